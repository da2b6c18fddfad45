"""Per-call overhead: the time of a list that does not depend on its length.

If each node has one rank, all ranks reduce together; otherwise the ranks of each node do, on all
nodes at the same time. Ranks leave a barrier up to a latency apart, which is many times the
overhead. But an early rank waits as much longer as a late one waits less, so the mean over all
ranks is right. That holds only if ranks end as far apart as they began, unlike guests and hosts of
`gtopk`. So ranks run gtopk's rounds on a circle, on which all of them do the same:

    gtopk       swap with the rank at distance 1       then at distance 2
                0 <-> 1     2 <-> 3                    0 <-> 2     1 <-> 3
    circle      send to the rank 1 ahead               then 2 ahead; receive from 2 behind
                0 -> 1 -> 2 -> 3 -> 4 -> 0             0 -> 2 -> 4 -> 1 -> 3 -> 0

Ok-Topk sends all parts at once, and needs no circle; but if ranks begin apart, its time is measured
too long by up to a fifth of a latency in all. It is measured last, among at most 64 ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import numpy as np

from .. import wire
from ..algorithms import ALGORITHMS
from ..algorithms.conservation import rounding_error
from ..algorithms.gtopk import reduce
from ..algorithms.regions import Regions
from ..transports.local import local_world
from ..transports.reductions import Endpoint
from ..transports.transport import Transport
from ..vector import Array, SparseVector
from ..wire import EXACT
from .network import Network, Rates
from .prediction import Candidate, predict
from .probes import REPEATS, Clock, agree_on_mean
from .schedules import SCHEDULES, Order

CALLS_SECONDS: Final = 0.4
DENSITY: Final = 0.001

_SHORT_ENTRIES: Final = 16  # entries
_REGION_ENTRIES: Final = 4  # entries in each region of Ok-Topk
_MAX_OKTOPK_RANKS: Final = 64  # as every rank sends to every other
_REST_SECONDS: Final = 0.02
_RUNS: Final = 7  # of which the median counts


def picks(k: int, random: np.random.Generator) -> SparseVector:
    """Return k random entries, or a few less, of density DENSITY."""
    length = round(k / DENSITY)
    indices = np.unique(random.integers(0, length, k)).astype(np.int32)
    return SparseVector(indices, random.random(indices.size, np.float32) + 1, length)


def even_picks(rank: int, size: int) -> tuple[SparseVector, Regions]:
    """Return a rank's evenly spaced entries, and regions with equally many entries.

    Rank 0 has the largest values, so the update has equally many of every region, and nothing is
    balanced.
    """
    k, step = _REGION_ENTRIES * size, round(1 / DENSITY)
    indices = step // size * rank + np.arange(0, k * step, step)
    values = np.random.default_rng(rank).random(k, np.float32) + (2 if rank == 0 else 1)
    regions = Regions()
    bounds = [region * _REGION_ENTRIES * step for region in range(size + 1)]
    regions.resume({"cut": [bounds, list(range(size))], "served": 1, "fullest": 1.0})
    return SparseVector(indices.astype(np.int32), values, k * step), regions


def own_call_seconds(stopwatch: Clock, random: np.random.Generator) -> tuple[float, float, float]:
    """Return this rank's own seconds of a swap of short lists, of decoding one, of sending one.

    The swap comes after a rest, with cold caches, as in training it comes after a backward pass or
    a wait. Decoding and sending are measured with warm caches, as lists come one after the other.
    """
    transport, peer = local_world(2)
    own = picks(_SHORT_ENTRIES, random)
    message = wire.encode(own, own.entries, EXACT).message

    def swap() -> float:
        peer.send(message, 0)()
        time.sleep(_REST_SECONDS)
        begun = stopwatch()
        reduce(own, own.entries, transport)
        peer.receive(0)
        return stopwatch() - begun

    def read() -> float:
        begun = stopwatch()
        wire.decode(message, own, own.entries, 0, EXACT)
        return stopwatch() - begun

    def send() -> float:
        begun = stopwatch()
        encoded = wire.encode(own, own.entries, EXACT)
        rounding_error(own, encoded.vector, EXACT)
        transport.send(encoded.message, 1)()
        seconds = stopwatch() - begun
        peer.receive(0)
        return seconds

    def least(run: Callable[[], float]) -> float:
        return min(run() for _ in range(REPEATS))  # disturbances only make a run longer

    return least(swap), least(read), least(send)


def measure_calls(
    transport: Transport, network: Network, rates: Rates, clock: Clock = time.perf_counter
) -> Rates:
    """Return the rates with the per-call overheads of lists, measured on all ranks after a rest.

    They are the median of a few runs, less the time of messages and entries. Algorithms alternate,
    so that a disturbance does not affect most runs of one. Every rank must call it, and gets the
    same rates. A single rank keeps its own measurement.
    """
    if transport.size == 1:
        return rates
    inside = network.ranks_per_node > 1
    group = transport.subset(transport.node()) if inside else transport
    size = network.ranks_per_node if inside else network.ranks
    is_full = group.size == size  # otherwise this node has fewer ranks than others
    circle = _Circle(group)
    own = picks(_SHORT_ENTRIES, np.random.default_rng(transport.rank))
    # Any format will do: the lists are too short for coding rates to matter.
    format = next(iter(rates.coding))
    oktopk_group = None
    if is_full and group.rank < _MAX_OKTOPK_RANKS:
        oktopk_group = group.subset(range(min(size, _MAX_OKTOPK_RANKS)))

    def timed(
        algorithm: str,
        picked: SparseVector,
        among: Transport,
        within: Transport | None = group,
        **options: Any,
    ) -> float:
        """Return the mean seconds of the ranks `within`, which leave a barrier together."""
        time.sleep(_REST_SECONDS)
        # A rank that takes no part must still agree on the mean, a collective of all ranks.
        if within is None:
            return agree_on_mean(transport, math.nan)
        within.barrier()
        begun = clock()
        if is_full:
            ALGORITHMS[algorithm](picked, picked.entries, among, format=format, **options)
        return agree_on_mean(transport, clock() - begun if is_full else math.nan)

    runs: list[list[float]] = []
    while len(runs) < _RUNS and sum(map(sum, runs)) < CALLS_SECONDS:
        swap = timed("gtopk", own, cast("Transport", circle))
        runs.append([swap, timed("topk-allgather", own, group)])
    swapped, gathered = map(statistics.median, zip(*runs, strict=True))
    among = min(size, _MAX_OKTOPK_RANKS)
    # Ranks from _MAX_OKTOPK_RANKS on take no part, so any list will do for them.
    even_list, regions = even_picks(min(group.rank, _MAX_OKTOPK_RANKS - 1), among)
    split = partial(
        timed, "oktopk", even_list, oktopk_group or group, oktopk_group, regions=regions
    )
    split()  # not counted, as it may open connections between all ranks
    splits: list[float] = []
    while len(splits) < _RUNS and sum(splits) < CALLS_SECONDS:
        splits.append(split())
    link, measured = network.link(int(not inside)), rates.without_calls()
    for algorithm, picked, seconds, ranks, rate, count in (
        ("gtopk", own, swapped, _paired(size), "swap_seconds", "swaps"),
        ("topk-allgather", own, gathered, size, "list_seconds", "others"),
        ("oktopk", even_list, statistics.median(splits), among, "send_seconds", "sends"),
    ):
        length, k = picked.length, picked.entries
        candidate = Candidate(algorithm, k / length, format)
        expected = predict(candidate, length, Network(ranks, link), measured).exchange_seconds
        steps = SCHEDULES[algorithm](Order(length, k, ranks))
        lists = sum(step.times * getattr(step, count) for step in steps)
        # In this order, as an algorithm's expected time uses the overheads found before.
        measured = measured._replace(**{rate: max(0.0, seconds - expected) / lists})
    return measured


def _paired(size: int) -> int:
    """Return how many of `size` ranks `gtopk` pairs: the largest power of two."""
    return 1 << (size.bit_length() - 1)


class _Circle(Endpoint):
    """An endpoint for gtopk on a circle, on which every rank considers itself rank 0.

    A message to rank d is sent to the rank d places ahead; one from rank d comes from d places
    behind. The size is the largest power of two, the ranks that `gtopk` pairs.
    """

    def __init__(self, group: Transport) -> None:
        self.rank, self.size = 0, _paired(group.size)
        self.ranks = range(self.size)
        self._group = group

    @property
    def begun(self) -> int:
        return self._group.begun

    def send(self, message: Array, to: int) -> Callable[[], None]:
        return self._group.send(message, (self._group.rank + to) % self._group.size)

    def receive(self, source: int) -> Array:
        return self._group.receive((self._group.rank - source) % self._group.size)

    exchange = Transport.exchange
    exchange_all = Transport.exchange_all
    receive_each = Transport.receive_each
