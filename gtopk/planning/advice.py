"""Advice: one sentence at the start of a run about the time that compression saves, with details.

It rests on links and rates that are measured once and kept for a week (collectives.cost_model):
about three seconds the first time, on all ranks together. GTOPK_ADVICE=off turns it off.

Also here: the seconds that a step's exchange should take, by the model and the measured links.
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
from .comparison import DENSE, LABELS, Cluster, Comparison, compare, in_a_step, where_it_pays


def expected(
    compression: object, length: int, calibration: Calibration, value_bytes: int = 4
) -> Prediction | None:
    """Return the prediction for the exchange of a gradient of `length` values.

    None for a compression that chooses by itself, and for cases beyond the model: across nodes all
    algorithms but gtopk, dense gradients inside nodes, nodes given by number that share their
    hosts' links with others or stretch over several hosts, and nodes of different numbers of ranks.
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
        found = [
            predict(compression.candidate(format), length, network, rates, value_bytes)
            for format in compression.formats()
        ]
        # The run itself takes the quickest of the formats that it may send.
        return min(found, key=lambda each: each.seconds)
    if isinstance(compression, ErrorFeedback):
        return None
    return predict(Candidate("dense"), length, network, rates, value_bytes)


class Sized(Protocol):
    """A bucket of which at least the size is known: a BucketExchange, or another."""

    @property
    def elements(self) -> int: ...


def _way_of(bucket_exchange: Sized) -> Exchange | None:
    """Return how a bucket is exchanged, but for what is sent along once; None: as it is, sparse."""
    exchange = bucket_exchange.exchange if isinstance(bucket_exchange, BucketExchange) else None
    # Draining is a single step's: a prediction for it would be wrong from the next step on.
    return exchange.next_exchange if isinstance(exchange, DrainingExchange) else exchange


def expected_seconds(bucket_exchanges: Sequence[Sized], calibration: Calibration) -> float | None:
    """Return the seconds predicted for all buckets; None where one is beyond the model."""
    seconds = 0.0
    for bucket_exchange in bucket_exchanges:
        exchange = _way_of(bucket_exchange)
        plain = isinstance(exchange, DenseExchange | SparseExchange)
        if not isinstance(bucket_exchange, BucketExchange) or not plain:
            return None
        compression = getattr(exchange, "compression", None)
        value_bytes = bucket_exchange.bucket.dtype.itemsize
        found = expected(compression, bucket_exchange.elements, calibration, value_bytes)
        if found is None:
            return None
        seconds += found.seconds
    return seconds


def in_question(bucket_exchanges: Sequence[Sized]) -> tuple[list[BucketExchange], bool]:
    """Return the buckets that could be compressed, and whether they are.

    If any are compressed, these are the ones: buckets that are dense beside them always are.
    """
    dense, compressed = [], []
    for bucket_exchange in bucket_exchanges:
        way = _way_of(bucket_exchange) if bucket_exchange.elements else None
        if not isinstance(bucket_exchange, BucketExchange) or way is None:
            continue
        if isinstance(way, DenseExchange | CompressorExchange):
            dense.append(bucket_exchange)
        else:
            compressed.append(bucket_exchange)
    return compressed or dense, bool(compressed)


def value_bytes_of(asked: Sequence[BucketExchange]) -> tuple[int, int]:
    """Return the bytes of a value of these buckets, and of one where they travel whole."""
    in_bucket = max((each.bucket.dtype.itemsize for each in asked), default=4)
    ways = map(_way_of, asked)
    compressors = {way.compressor for way in ways if isinstance(way, CompressorExchange)}
    # Those of the user send what nobody knows: they count as the bucket's values.
    in_16_bits = compressors and all(issubclass(each, FP16Compressor) for each in compressors)
    return in_bucket, 2 if in_16_bits else in_bucket


_log = logging.getLogger("gtopk")


class Advice(NamedTuple):
    """The sentence that is logged, and how to work out its grounds, for GTOPK_LOG=debug."""

    sentence: str
    # str() is "": there are no details.
    explain: Callable[[], str] = str


def say_once(here: World, said: Advice) -> None:
    """Log the advice on rank 0, unless this world has logged one."""
    if here.rank == 0 and not here.advised:
        here.advised = True
        _log.info("%s", said.sentence)
        # Only where they are shown: the details search for a bandwidth, and the first step waits.
        if _log.isEnabledFor(logging.DEBUG) and (details := said.explain()):
            _log.debug("%s", details)


def advice(
    compression: object,
    lengths: Sequence[int],
    calibration: Calibration,
    others: int = 0,
    per: str = "step",
    beyond: str = "",
    other_buckets: int | None = None,
    over: str = "",
    value_bytes: int = 4,
    dense_value_bytes: int = 4,
) -> Advice:
    """Return the advice.

    lengths: by bucket, the number of values that could be compressed; others: the number of values
        that are sent uncompressed in any case.
    per: the unit that an exchange ends, as the text names it.
    beyond: the name of an exchange that the model does not cover, and that runs here; "": none.
    other_buckets: the number of buckets in the other case: if compressed values were sent whole, or
                   uncompressed ones compressed; None: the same.
    over: the name of the transport.
    value_bytes, dense_value_bytes: as in `Cluster`.
    """
    # Dense has no density: it is compared with sparse methods at the one to begin with.
    density = getattr(compression, "density", None) or usual_density(sum(lengths))
    rates = calibration.rates
    # Methods are compared at exact values: what fewer bits would save is a choice of its own.
    exact = {format: rate for format, rate in rates.coding.items() if format.values == "exact"}
    # The compressed case first, whichever of the two runs.
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
    runs = _reduced(compression, comparison.cluster, rates)
    if not beyond and runs is None and isinstance(compression, SparseCompression):
        beyond = LABELS[compression.algorithm]
    beyond = beyond and f"{beyond} as it runs here is beyond the model"

    def explain() -> str:
        if _is_compressed(runs):
            name, edge = LABELS[runs.candidate.algorithm], _edge_of(compression, comparison, rates)
        else:
            name, edge = LABELS[found.candidate.algorithm], comparison.break_even
        is_somewhere = edge.lowest < edge.highest
        network = comparison.cluster.network
        link = network.farthest
        beside = f" (and {count_text(others)} uncompressed either way)" if others else ""
        return (
            f"estimated exchange per {per}, {count_text(comparison.cluster.length)} values{beside},"
            f" {network.ranks} ranks, nothing hidden behind backward: "
            f"{_verdict(found, comparison.dense, runs, beyond)}; "
            f"{'' if is_somewhere else 'at this latency '}"
            f"{name} pays {where_it_pays(edge)}; links {bandwidth_text(link.bits_per_second)}, "
            f"{seconds_text(link.latency_seconds)}, {calibration.origin}"
        )

    where = f"{comparison.cluster.network.ranks} ranks" + (f" over {over}" if over else "")
    return Advice(f"{where}: {_in_short(found, comparison.dense, runs, beyond, per)}", explain)


def _in_short(
    found: Prediction, dense: Prediction, runs: Prediction | None, beyond: str, per: str
) -> str:
    """Return the verdict as one clause."""
    whole = f"{seconds_text(dense.seconds)} {with_article(per)} (estimate)"
    if beyond:
        return f"dense takes {whole}; {beyond}"
    sparse = runs if _is_compressed(runs) else found
    name = f"{LABELS[sparse.candidate.algorithm]} at {_amount(sparse.candidate)}"
    outcome = _outcome(sparse, dense.seconds, _is_compressed(runs))
    if sparse.seconds * SAME < dense.seconds:
        return f"{name} {outcome} of dense's {whole}"
    what = outcome or "compression makes no difference here"
    return f"{what}: dense takes {whole}, {name} {seconds_text(sparse.seconds)}"


def _verdict(found: Prediction, dense: Prediction, runs: Prediction | None, beyond: str) -> str:
    fewer = dense.sent.bytes / found.sent.bytes if found.sent.bytes else math.inf
    options = _options(found.candidate, runs)
    said = (
        f"dense {seconds_text(dense.seconds)}, {LABELS[found.candidate.algorithm]} "
        f"{seconds_text(found.seconds)} ({options}, {bytes_text(found.sent.bytes)} a rank, "
        f"1/{digits(fewer)} of the bytes)"
    )
    if beyond:
        return f"{said}: {beyond}"
    sparse = runs if _is_compressed(runs) else found
    if sparse.candidate != found.candidate:
        name = LABELS[sparse.candidate.algorithm]
        said += f", {name} as it runs {seconds_text(sparse.seconds)}"
    outcome = _outcome(sparse, dense.seconds, _is_compressed(runs))
    return f"{said}: {outcome or 'it makes no difference here'}"


def _outcome(sparse: Prediction, dense_seconds: float, compressed: bool) -> str:
    """Return what the exchange of a sparse method comes to; "" where it makes no difference."""
    if sparse.seconds * SAME < dense_seconds:
        verb = "saves" if compressed else "would save"
        return f"{verb} up to {seconds_text(dense_seconds - sparse.seconds)}"
    if dense_seconds * SAME < sparse.seconds:
        return "dense is faster here" if compressed else "leave it dense"
    return ""


def _amount(way: Candidate) -> str:
    """Return the option that sets how much a candidate sends in a step, as a text."""
    if way.algorithm == "shards":
        return f"period {1.0 / way.density:.0f}"
    return f"density {way.density:g}"


def _options(way: Candidate, runs: Prediction | None) -> str:
    """Return a candidate's options, with those that differ from the running prediction `runs`."""
    options = [_amount(way), way.wider.strip()]
    if runs is not None and runs.candidate.algorithm == way.algorithm:
        is_other = runs.candidate.format.indices != way.format.indices
        options += [f"wire={way.format.indices}"] * is_other
    return ", ".join(filter(None, options))


def _is_compressed(runs: Prediction | None) -> TypeGuard[Prediction]:
    return runs is not None and runs.candidate.algorithm != "dense"


def _edge_of(compression: object, comparison: Comparison, rates: Rates) -> BreakEven:
    """Return the bandwidth below which the running compression beats dense."""
    cluster = comparison.cluster

    def runs_on(link: Link) -> float:
        runs = _reduced(compression, cluster.on(link), rates)
        return runs.seconds if runs is not None else math.inf

    return break_even(
        lambda link: cluster.on(link).reduced(DENSE, rates).seconds,
        runs_on,
        cluster.network.farthest.latency_seconds,
    )


def _reduced(compression: object, cluster: Cluster, rates: Rates) -> Prediction | None:
    """Return the compression's prediction on a cluster; None beyond the model."""
    calibration = Calibration(cluster.network, rates, "")
    if not isinstance(compression, ErrorFeedback):
        return cluster.reduced(DENSE, rates)
    found = expected(compression, cluster.bucket_length, calibration, cluster.value_bytes)
    if found is None:
        return None
    return in_a_step(found.times(cluster.buckets), cluster.network, cluster.buckets)
