"""Expectation: what the exchange of a step is to take, by the model and the links measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from collectives.cost_model import Calibration, Candidate, Prediction, predict

from ..compression import ErrorFeedback, Hierarchical, SparseCompression
from ..exchange.buckets.buckets import Bucket
from ..exchange.exchange import (
    CompressorExchange,
    DenseExchange,
    Exchange,
    SendingAlong,
    SparseExchange,
)
from ..exchange.node_exchange import NodeExchange
from ..telemetry.step_report import Sized


def expected(
    compression: object, length: int, calibration: Calibration, value_bytes: int = 4
) -> Prediction | None:
    """Return what the exchange of such a gradient is expected to take.

    None for what chooses, and beyond the model: across nodes all but gtopk, dense gradients inside
    them, nodes by number that share their hosts' links with others, or stretch over several, and
    nodes of unlike numbers of ranks.
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
        return min(found, key=lambda each: each.seconds)
    if isinstance(compression, ErrorFeedback):
        return None
    return predict(Candidate("dense"), length, network, rates, value_bytes)


@runtime_checkable
class Exchanging(Protocol):
    """A BucketExchange, or what stands for one: a bucket, and the way it is exchanged."""

    bucket: Bucket
    exchange: Exchange

    @property
    def elements(self) -> int: ...


def _way_of(bucket_exchange: Sized) -> Exchange | None:
    """Return how a bucket is exchanged, but for what is sent along once; None: as it is, sparse."""
    exchange = bucket_exchange.exchange if isinstance(bucket_exchange, Exchanging) else None
    return exchange.then if isinstance(exchange, SendingAlong) else exchange


def expected_seconds(bucket_exchanges: Sequence[Sized], calibration: Calibration) -> float | None:
    """Return what all buckets are expected to take; None where one is beyond the model."""
    seconds = 0.0
    for bucket_exchange in bucket_exchanges:
        exchange = _way_of(bucket_exchange)
        plain = isinstance(exchange, DenseExchange | SparseExchange)
        if (
            not isinstance(bucket_exchange, Exchanging)
            or not plain
            or isinstance(exchange, NodeExchange)
        ):
            return None
        compression = getattr(exchange, "compression", None)
        value_bytes = bucket_exchange.bucket.dtype.itemsize
        found = expected(compression, bucket_exchange.elements, calibration, value_bytes)
        if found is None:
            return None
        seconds += found.seconds
    return seconds


def in_question(bucket_exchanges: Sequence[Sized]) -> tuple[list[Exchanging], bool]:
    """Return the buckets of which compressing is a question, and whether they are compressed.

    Those that are, where some are: what travels dense beside them does so in any case.
    """
    dense, compressed = [], []
    for bucket_exchange in bucket_exchanges:
        way = _way_of(bucket_exchange) if bucket_exchange.elements else None
        if not isinstance(bucket_exchange, Exchanging) or way is None:
            continue
        if isinstance(way, DenseExchange | CompressorExchange):
            dense.append(bucket_exchange)
        else:
            compressed.append(bucket_exchange)
    return compressed or dense, bool(compressed)
