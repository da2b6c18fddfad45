"""Advice: logs at the start of a run how much time compression saves, with details on request.

The prediction uses link and rate measurements that are cached for a week (collectives.cost_model).
Measuring takes about three seconds, on all ranks together. GTOPK_ADVICE=off turns the advice off.

Also predicts the seconds of a step's exchange, from the cost model and the measured links.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeGuard

from collectives.cost import BreakEven, Link, break_even
from collectives.cost_model import Calibration, Candidate, Prediction, Rates, predict

from ..compression import (
    ErrorFeedback,
    FP16Compressor,
    Hierarchical,
    SparseCompression,
    usual_density,
)
from ..exchange.bucket_exchange import BucketExchange, DrainingExchange
from ..exchange.exchange import CompressorExchange, DenseExchange, Exchange, SparseExchange
from ..runtime.world.membership import World
from ..telemetry.step_report import SAME
from ..units import bandwidth_text, bytes_text, count_text, digits, seconds_text, with_article
from .comparison import DENSE, LABELS, Cluster, Comparison, break_even_text, compare, in_a_step


def expected(
    compression: object, length: int, calibration: Calibration, value_bytes: int = 4
) -> Prediction | None:
    """Return the prediction for the exchange of a gradient of `length` values.

    Returns None for a compression that chooses its own algorithm, and for hierarchical cases that
    the model does not cover: any algorithm but gtopk across nodes; dense gradients inside nodes;
    a node_size that makes nodes share a host's link or span several hosts; nodes with unequal
    numbers of ranks.
    """
    network, rates = calibration.network, calibration.rates
    if isinstance(compression, Hierarchical):
        node_size = compression.node_size or network.ranks_per_node
        modelled = (compression.across, compression.inside) == ("gtopk", "picks")
        if not modelled or network.ranks_per_node not in (1, node_size):
            return None
        if network.ranks % node_size:
            return None
        network = network._replace(ranks_per_node=node_size)
    if isinstance(compression, SparseCompression):
        predictions = [
            predict(compression.candidate(format), length, network, rates, value_bytes)
            for format in compression.formats()
        ]
        # The run itself uses the quickest of its allowed formats.
        return min(predictions, key=lambda each: each.seconds)
    if isinstance(compression, ErrorFeedback):
        return None
    return predict(Candidate("dense"), length, network, rates, value_bytes)


class Sized(Protocol):
    """Any bucket with a known size, such as a BucketExchange."""

    @property
    def elements(self) -> int: ...


def _lasting_exchange(bucket_exchange: Sized) -> Exchange | None:
    """Return the exchange that a bucket uses, ignoring a one-time drain; None for other buckets."""
    exchange = bucket_exchange.exchange if isinstance(bucket_exchange, BucketExchange) else None
    # Draining lasts one step; a prediction for it would be wrong from the next step on.
    return exchange.next_exchange if isinstance(exchange, DrainingExchange) else exchange


def expected_seconds(bucket_exchanges: Sequence[Sized], calibration: Calibration) -> float | None:
    """Return the seconds predicted for all buckets; None if the model does not cover one."""
    seconds = 0.0
    for bucket_exchange in bucket_exchanges:
        if not bucket_exchange.elements:
            continue  # nothing is sent
        exchange = _lasting_exchange(bucket_exchange)
        plain = isinstance(exchange, DenseExchange | SparseExchange)
        if not isinstance(bucket_exchange, BucketExchange) or not plain:
            return None
        compression = getattr(exchange, "compression", None)
        value_bytes = bucket_exchange.bucket.dtype.itemsize
        prediction = expected(compression, bucket_exchange.elements, calibration, value_bytes)
        if prediction is None:
            return None
        seconds += prediction.seconds
    return seconds


def compressible_buckets(bucket_exchanges: Sequence[Sized]) -> tuple[list[BucketExchange], bool]:
    """Return the buckets that could be compressed, and whether they are.

    If some are compressed, only those are returned: the dense buckets beside them stay dense.
    """
    dense, compressed = [], []
    for bucket_exchange in bucket_exchanges:
        exchange = _lasting_exchange(bucket_exchange) if bucket_exchange.elements else None
        if not isinstance(bucket_exchange, BucketExchange) or exchange is None:
            continue
        if isinstance(exchange, DenseExchange | CompressorExchange):
            dense.append(bucket_exchange)
        else:
            compressed.append(bucket_exchange)
    return compressed or dense, bool(compressed)


def value_bytes_of(bucket_exchanges: Sequence[BucketExchange]) -> tuple[int, int]:
    """Return the bytes of one value in these buckets, and of one value when sent dense."""
    in_bucket = max((each.bucket.dtype.itemsize for each in bucket_exchanges), default=4)
    exchanges = map(_lasting_exchange, bucket_exchanges)
    compressors = {
        exchange.compressor for exchange in exchanges if isinstance(exchange, CompressorExchange)
    }
    # The size that a user's own compressor sends is unknown; assume the bucket's.
    in_16_bits = compressors and all(issubclass(each, FP16Compressor) for each in compressors)
    return in_bucket, 2 if in_16_bits else in_bucket


_log = logging.getLogger("gtopk")


class Advice(NamedTuple):
    """The sentence that is logged, and a function that returns details for GTOPK_LOG=debug."""

    sentence: str
    # str() returns "", which means no details.
    explain: Callable[[], str] = str


def log_once(here: World, advice: Advice) -> None:
    """Log the advice on rank 0, once in a world."""
    if here.rank == 0 and not here.advised:
        here.advised = True
        _log.info("%s", advice.sentence)
        # The details take a bandwidth search while the first step waits, so only on request.
        if _log.isEnabledFor(logging.DEBUG) and (details := advice.explain()):
            _log.debug("%s", details)


def advice(
    compression: object,
    lengths: Sequence[int],
    calibration: Calibration,
    others: int = 0,
    per: str = "step",
    uncovered: str = "",
    other_buckets: int | None = None,
    over: str = "",
    value_bytes: int = 4,
    dense_value_bytes: int = 4,
) -> Advice:
    """Return the advice.

    lengths: for each bucket, the number of values that could be compressed; others: the number of
        values that are always sent dense.
    per: the text's name for the unit of work between two exchanges.
    uncovered: the name of a running exchange that the model does not cover; "" for none.
    other_buckets: the number of buckets in the alternative: dense for a compressed run, compressed
                   for a dense one; None for the same number.
    over: the name of the transport.
    value_bytes, dense_value_bytes: as in `Cluster`.
    """
    # A dense run has no density; compare it with sparse methods at the usual density.
    density = getattr(compression, "density", None) or usual_density(sum(lengths))
    rates = calibration.rates
    # Compare methods with exact values only: using fewer bits is a separate choice.
    exact = {format: rate for format, rate in rates.coding.items() if format.values == "exact"}
    # Put the compressed case first, even if the run is dense.
    buckets = [len(lengths), other_buckets or len(lengths)]
    if not isinstance(compression, ErrorFeedback):
        buckets.reverse()
    cluster = Cluster(
        sum(lengths),
        calibration.network,
        density,
        buckets=buckets[0],
        dense_buckets=buckets[1],
        value_bytes=value_bytes,
        dense_value_bytes=dense_value_bytes,
    )
    comparison = compare(cluster, rates._replace(coding=exact))
    found = comparison.cheapest_sparse
    running = _reduced(compression, comparison.cluster, rates)
    if not uncovered and running is None and isinstance(compression, SparseCompression):
        uncovered = LABELS[compression.algorithm]
    uncovered = uncovered and f"the model does not cover {uncovered} as it runs here"

    def explain() -> str:
        if _is_compressed(running):
            name = LABELS[running.candidate.algorithm]
            limit = _break_even_of(compression, comparison, rates)
        else:
            name, limit = LABELS[found.candidate.algorithm], comparison.break_even
        has_bound = limit.lowest < limit.highest
        network = comparison.cluster.network
        link = network.farthest
        uncompressed = f" (and {count_text(others)} uncompressed either way)" if others else ""
        return (
            f"estimated exchange per {per}, {count_text(comparison.cluster.length)} values"
            f"{uncompressed}, {network.ranks} ranks, nothing hidden behind backward: "
            f"{_verdict(found, comparison.dense, running, uncovered)}; "
            f"{'' if has_bound else 'at this latency '}"
            f"{name} pays {break_even_text(limit)}; links {bandwidth_text(link.bits_per_second)}, "
            f"{seconds_text(link.latency_seconds)}, {calibration.origin}"
        )

    where = f"{comparison.cluster.network.ranks} ranks" + (f" over {over}" if over else "")
    return Advice(f"{where}: {_summary(found, comparison.dense, running, uncovered, per)}", explain)


def _summary(
    found: Prediction, dense: Prediction, running: Prediction | None, uncovered: str, per: str
) -> str:
    """Return the verdict as one clause."""
    dense_text = f"{seconds_text(dense.seconds)} {with_article(per)} (estimate)"
    if uncovered:
        return f"dense takes {dense_text}; {uncovered}"
    sparse = running if _is_compressed(running) else found
    name = f"{LABELS[sparse.candidate.algorithm]} at {_amount(sparse.candidate)}"
    outcome = _outcome(sparse, dense.seconds, _is_compressed(running))
    if sparse.seconds * SAME < dense.seconds:
        return f"{name} {outcome} of dense's {dense_text}"
    outcome_text = outcome or "compression makes no difference here"
    return f"{outcome_text}: dense takes {dense_text}, {name} {seconds_text(sparse.seconds)}"


def _verdict(
    found: Prediction, dense: Prediction, running: Prediction | None, uncovered: str
) -> str:
    ratio = dense.sent.bytes / found.sent.bytes if found.sent.bytes else math.inf
    options = _options(found.candidate, running)
    text = (
        f"dense {seconds_text(dense.seconds)}, {LABELS[found.candidate.algorithm]} "
        f"{seconds_text(found.seconds)} ({options}, {bytes_text(found.sent.bytes)} a rank, "
        f"1/{digits(ratio)} of the bytes)"
    )
    if uncovered:
        return f"{text}: {uncovered}"
    sparse = running if _is_compressed(running) else found
    if sparse.candidate != found.candidate:
        name = LABELS[sparse.candidate.algorithm]
        text += f", {name} as it runs {seconds_text(sparse.seconds)}"
    outcome = _outcome(sparse, dense.seconds, _is_compressed(running))
    return f"{text}: {outcome or 'it makes no difference here'}"


def _outcome(sparse: Prediction, dense_seconds: float, is_compressed: bool) -> str:
    """Return the outcome of a sparse exchange as text; "" if it makes no difference."""
    if sparse.seconds * SAME < dense_seconds:
        verb = "saves" if is_compressed else "would save"
        return f"{verb} up to {seconds_text(dense_seconds - sparse.seconds)}"
    if dense_seconds * SAME < sparse.seconds:
        return "dense is faster here" if is_compressed else "leave it dense"
    return ""


def _amount(candidate: Candidate) -> str:
    """Return, as text, the option that sets how much a candidate sends in a step."""
    if candidate.algorithm == "shards":
        return f"period {1.0 / candidate.density:.0f}"
    return f"density {candidate.density:g}"


def _options(candidate: Candidate, running: Prediction | None) -> str:
    """Return a candidate's options as text, including those that differ from `running`."""
    options = [_amount(candidate), candidate.wider.strip()]
    if running is not None and running.candidate.algorithm == candidate.algorithm:
        is_other = running.candidate.format.indices != candidate.format.indices
        options += [f"wire={candidate.format.indices}"] * is_other
    return ", ".join(filter(None, options))


def _is_compressed(running: Prediction | None) -> TypeGuard[Prediction]:
    return running is not None and running.candidate.algorithm != "dense"


def _break_even_of(compression: object, comparison: Comparison, rates: Rates) -> BreakEven:
    """Return the bandwidth below which the running compression beats dense."""
    cluster = comparison.cluster

    def running_on(link: Link) -> float:
        running = _reduced(compression, cluster.on(link), rates)
        return running.seconds if running is not None else math.inf

    return break_even(
        lambda link: cluster.on(link).reduced(DENSE, rates).seconds,
        running_on,
        cluster.network.farthest.latency_seconds,
    )


def _reduced(compression: object, cluster: Cluster, rates: Rates) -> Prediction | None:
    """Return the compression's prediction on a cluster; None if the model does not cover it."""
    calibration = Calibration(cluster.network, rates, "")
    if not isinstance(compression, ErrorFeedback):
        return cluster.reduced(DENSE, rates)
    found = expected(compression, cluster.bucket_length, calibration, cluster.value_bytes)
    if found is None:
        return None
    return in_a_step(found.times(cluster.buckets), cluster.network, cluster.buckets)
