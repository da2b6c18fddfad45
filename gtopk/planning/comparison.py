"""Comparison: predicts the time of every method on a cluster, and which method pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from collectives.cost import ERROR, BreakEven, Link, break_even
from collectives.cost_model import (
    Budget,
    Calibration,
    Candidate,
    Format,
    Network,
    Prediction,
    Rates,
    choose,
    predict,
)
from collectives.cost_model.choice import SPARSE, offered
from collectives.cost_model.prediction import USUAL_WIDENINGS
from collectives.wire import WHOLE

from ..units import SPACE, about_bandwidth_text, rough_bandwidth_text

DENSE: Final = Candidate("dense")
# The defaults of `Compression.shards`.
SHARDS: Final = Candidate("shards", 0.5, Format(WHOLE, "int2"))
LABELS = {
    "dense": "dense allreduce",
    "topk-allgather": "top-k allgather",
    "gtopk-tree": "gTop-k, a tree",
    "gtopk": "gTop-k",
    "oktopk": "Ok-Topk",
    "hierarchical": "hierarchical",
    "shards": "shards",
}
_ERROR_TEXT = f"{100 * ERROR:.0f}{SPACE}% off"


@dataclass(frozen=True)
class Cluster:
    """The cluster and the neural network to compare methods for.

    length:            number of values in the gradient.
    buckets:           number of equally large buckets, which are reduced one after the other.
    dense_buckets:     number of buckets when the gradient is sent dense; None for the same.
    value_bytes:       bytes of a value before encoding.
    dense_value_bytes: bytes of a value that is sent dense.
    backward_seconds:  duration of the backward pass. Dense buckets are sent while it runs. Sparse
                       methods select from the whole gradient, so they start when it has ended.
    """

    length: int
    network: Network
    density: float
    backward_seconds: float = 0.0
    buckets: int = 1
    dense_buckets: int | None = None
    value_bytes: int = 4
    dense_value_bytes: int = 4

    def on(self, link: Link) -> Cluster:
        """Return the cluster with another link between its nodes, or inside its only node.

        The communication library's allreduce may take more time per byte than the link. If that is
        processor work, it stays the same on another link (1 ns on emulated links,
        docs/measured/forecasts.md). If it is due to the algorithm, it scales with the link's. The
        quicker of the two is assumed.
        """
        old, allreduce = self.network.farthest, self.network.allreduce
        longer = _ratio(link.latency_seconds, old.latency_seconds)
        agreement_seconds = self.network.agreement_seconds
        if agreement_seconds is not None:
            agreement_seconds *= longer
        if allreduce is not None:
            excess = allreduce.seconds_per_byte - old.seconds_per_byte
            per_byte = _ratio(link.seconds_per_byte, old.seconds_per_byte)
            allreduce = Link(
                allreduce.latency_seconds * longer,
                min(
                    link.seconds_per_byte + max(0.0, excess), allreduce.seconds_per_byte * per_byte
                ),
            )
        network = self.network._replace(
            between=link,
            within=link if self.network.is_one_node else self.network.within,
            allreduce=allreduce,
            agreement_seconds=agreement_seconds,
        )
        return replace(self, network=network)

    @property
    def bucket_length(self) -> int:
        """Return the number of values in a compressed bucket."""
        return -(-self.length // self.buckets)

    def reduced(self, candidate: Candidate, rates: Rates) -> Prediction:
        """Return the prediction for reducing the gradient with a candidate."""
        buckets, value_bytes = self.buckets, self.value_bytes
        if candidate == DENSE:
            buckets, value_bytes = self.dense_buckets or buckets, self.dense_value_bytes
        prediction = predict(
            candidate, -(-self.length // buckets), self.network, rates, value_bytes
        )
        return in_a_step(prediction.times(buckets), self.network, buckets)

    def exposed_seconds(self, prediction: Prediction) -> float:
        """Return how many seconds of the exchange the backward pass does not hide."""
        if prediction.candidate.algorithm == "dense":
            return max(0.0, prediction.seconds - self.backward_seconds)
        return prediction.seconds


def _ratio(new: float, old: float) -> float:
    # A zero latency, or zero time per byte, cannot be scaled.
    return new / old if old else 1.0


@dataclass(frozen=True)
class Comparison:
    """The predictions for all methods, and which one pays.

    dense, sparse:    predictions; each sparse method in its quickest format.
    equal_bytes:      the sparse methods, each at the density that sends as many bytes as gtopk.
    shards:           its prediction, at any density; None if its value format was not measured.
    rates, formats:   the rates used, and the formats that sparse methods may send.
    """

    cluster: Cluster
    dense: Prediction
    sparse: Sequence[Prediction]
    equal_bytes: Sequence[Prediction]
    shards: Prediction | None
    rates: Rates
    formats: Sequence[Format]

    @cached_property
    def break_even(self) -> BreakEven:
        """The bandwidth at which the quickest sparse method and dense take equal times."""
        # Computed on demand: the search predicts some hundred clusters, which takes tens of
        # milliseconds, and the first step of a run needs only the times.
        cluster_on, rates, formats = self.cluster.on, self.rates, self.formats
        return break_even(
            lambda link: cluster_on(link).reduced(DENSE, rates).seconds,
            # Add backward to sparse; do not subtract it from dense: the margin scales all of that.
            lambda link: (
                self.cluster.backward_seconds
                + min(
                    each.seconds
                    for each in _sparse(cluster_on(link), rates, formats)
                    if each.candidate.algorithm in SPARSE
                )
            ),
            self.cluster.network.farthest.latency_seconds,
        )

    @property
    def methods(self) -> list[Prediction]:
        """Return all predictions, dense first."""
        shards = [] if self.shards is None else [self.shards]
        return [self.dense, *self.sparse, *shards]

    def exposed_seconds(self, prediction: Prediction) -> float:
        """Return how many seconds a method adds to a step."""
        return self.cluster.exposed_seconds(prediction)

    def speedup(self, prediction: Prediction) -> float:
        """Return dense's time divided by this method's; both are of backward and exchange."""
        backward = self.cluster.backward_seconds
        own = backward + self.exposed_seconds(prediction)
        return (backward + self.exposed_seconds(self.dense)) / own if own else 1.0

    @property
    def cheapest_sparse(self) -> Prediction:
        """Return the quickest of the sparse methods that Compression.auto offers."""
        offered = (each for each in self.sparse if each.candidate.algorithm in SPARSE)
        return min(offered, key=self.exposed_seconds)

    @cached_property
    def cheapest(self) -> Prediction:
        """The cheapest of dense and the offered methods; excludes the tree and shards."""
        return min(self.dense, self.cheapest_sparse, key=self.exposed_seconds)

    @property
    def pays(self) -> bool:
        """Tell whether to compress."""
        return self.cheapest.candidate.algorithm != "dense"


def pays_clearly(cluster: Cluster, rates: Rates, formats: Sequence[Format]) -> bool | None:
    """Tell whether to compress; None if the two times differ by less than the model's error.

    formats: the formats that sparse methods may send; `rates` may have others, too.
    """
    backward = cluster.backward_seconds
    dense = cluster.exposed_seconds(cluster.reduced(DENSE, rates))
    sparse = min(
        _in_quickest_format(name, cluster, rates, formats).seconds
        for name in offered(cluster.network)
    )
    # Apply the margin to whole steps: an error in the part that backward hides changes nothing.
    if backward + dense > (1 + ERROR) * (backward + sparse):
        return True
    return None if sparse < dense else False


def deciding(cluster: Cluster, rates: Rates, formats: Sequence[Format]) -> list[str]:
    """Return the inputs that change `pays_clearly`'s verdict if one alone is halved or doubled."""
    link, verdict = cluster.network.farthest, pays_clearly(cluster, rates, formats)
    inputs = []
    for factor, words in ((0.5, "half"), (2.0, "twice")):
        changed = {
            f"{words} the bandwidth": cluster.on(
                Link(link.latency_seconds, link.seconds_per_byte / factor)
            ),
            f"{words} the latency": cluster.on(
                Link(factor * link.latency_seconds, link.seconds_per_byte)
            ),
            f"{words} the density": replace(cluster, density=min(1.0, factor * cluster.density)),
        }
        if cluster.backward_seconds:
            changed[f"{words} the backward pass"] = replace(
                cluster, backward_seconds=factor * cluster.backward_seconds
            )
        inputs += [
            name
            for name, other in changed.items()
            if pays_clearly(other, rates, formats) is not verdict
        ]
    return inputs


def in_a_step(prediction: Prediction, network: Network, buckets: int) -> Prediction:
    """Return the prediction for a step of `buckets` reductions, including the ranks' agreements.

    Ranks agree once for the last bucket and once for all others together, which are ready at the
    same time unless backward delays them.
    """
    return replace(
        prediction, agreement_seconds=min(2, buckets) * network.expected_agreement_seconds
    )


def compare(cluster: Cluster, rates: Rates, formats: Sequence[Format] | None = None) -> Comparison:
    """Return the comparison of all methods on a cluster.

    formats: the formats that sparse methods may send; None for all with a measured rate.
    """
    formats = list(rates.coding) if formats is None else formats
    has_shards = rates.coding_of(SHARDS.format) is not None

    dense, sparse = cluster.reduced(DENSE, rates), _sparse(cluster, rates, formats)
    gtopk = next(each for each in sparse if each.candidate.algorithm == "gtopk")
    calibration = Calibration(cluster.network, rates, "")
    budget = Budget(bytes_per_step=gtopk.sent.most_bytes)
    # One format for all: a shorter index must not make a method look better at equal bytes.
    one_format = [gtopk.candidate.format]
    ranked = choose(
        cluster.length, calibration, budget, one_format, value_bytes=cluster.value_bytes
    )
    return Comparison(
        cluster,
        dense,
        sparse,
        [
            in_a_step(each, cluster.network, 1)
            for each in reversed(ranked)
            if each.candidate.algorithm != "dense"
        ],
        cluster.reduced(SHARDS, rates) if has_shards else None,
        rates,
        formats,
    )


def _sparse(cluster: Cluster, rates: Rates, formats: Sequence[Format]) -> list[Prediction]:
    """Return the predictions of all sparse methods; the tree is included only for comparison."""
    names = ["gtopk-tree", *offered(cluster.network)]
    return [_in_quickest_format(name, cluster, rates, formats) for name in names]


def _in_quickest_format(
    algorithm: str, cluster: Cluster, rates: Rates, formats: Sequence[Format]
) -> Prediction:
    return min(
        (
            cluster.reduced(
                Candidate(algorithm, cluster.density, format, USUAL_WIDENINGS.get(algorithm, 1.0)),
                rates,
            )
            for format in formats
        ),
        key=lambda prediction: prediction.seconds,
    )


def break_even_text(edge: BreakEven) -> str:
    """Return a text: "below about 7.3 Gbit/s (6 to 8.9 Gbit/s if a time is 20 % off)", or "above".

    The text gives only the bounds if the bandwidth is uncertain by more than a fifth.
    """
    none, every = "at most, perhaps at no bandwidth", "at least, perhaps at every bandwidth"
    side, at_slow, at_fast = ("above", every, none) if edge.above else ("below", none, every)
    lowest, highest = map(rough_bandwidth_text, (edge.lowest, edge.highest))
    match edge.lowest, edge.highest:
        case 0.0, 0.0:
            return "at no bandwidth"
        case math.inf, math.inf:
            return "at every bandwidth"
        case 0.0, math.inf:
            return "at no bandwidth or at every one: the two times are too close to tell"
        case 0.0, _:
            return f"{side} {highest} {at_slow}: a time may be {_ERROR_TEXT}"
        case _, math.inf:
            return f"{side} {lowest} {at_fast}: a time may be {_ERROR_TEXT}"
    # Give a common unit once: "6 to 8.9 Gbit/s".
    bounds = f"{lowest.removesuffix(SPACE + highest.rpartition(SPACE)[2])} to {highest}"
    if not edge.is_a_number or edge.bits_per_second is None:
        return f"{side} a bandwidth of {bounds}: a time may be {_ERROR_TEXT}"
    return (
        f"{side} {about_bandwidth_text(edge.bits_per_second)} ({bounds} if a time is {_ERROR_TEXT})"
    )
