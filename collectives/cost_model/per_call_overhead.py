"""Per-call overhead: measures the time of a list of any length, by reductions of a few entries.

Where each node has one rank, all of them reduce together, else those of each node, all nodes at the
same time. Ranks leave a barrier up to a latency apart, which is many times the calls' time. An
early rank waits as much longer as a late one waits less, so the mean over all ranks is right. That
fails where some ranks end before others, as guests and hosts of `gtopk` do. On a circle ranks end
as far apart as they began:

    4 ranks     swaps with the rank 1 beyond       then 2 beyond
                0 <-> 1     2 <-> 3                0 <-> 2     1 <-> 3
    a circle    to the rank 1 ahead                then 2 ahead, as it comes from behind
                0 -> 1 -> 2 -> 3 -> 4 -> 0         0 -> 2 -> 4 -> 1 -> 3 -> 0

Ok-Topk, whose parts all leave at once, has no circle: with ranks that begin apart, its time is
measured too long by up to a fifth of a latency in all. It is measured last, among at most 64 ranks.
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

_FEW: Final = 16  # entries
_OF_REGION: Final = 4  # entries in each region of Ok-Topk
_MOST: Final = 64  # ranks that Ok-Topk is measured on, where each sends to each
_REST_SECONDS: Final = 0.02
_GOES: Final = 7  # repetitions, of which the median counts


def picks(k: int, random: np.random.Generator) -> SparseVector:
    """Return k entries or a few less, as a selection leaves them."""
    length = round(k / DENSITY)
    indices = np.unique(random.integers(0, length, k)).astype(np.int32)
    return SparseVector(indices, random.random(indices.size, np.float32) + 1, length)


def even_picks(rank: int, size: int) -> tuple[SparseVector, Regions]:
    """Return a rank's evenly spaced entries, and even regions of all ranks' entries.

    Rank 0's are the largest: every region has equally many in the update, and none is balanced.
    """
    k, step = _OF_REGION * size, round(1 / DENSITY)
    indices = step // size * rank + np.arange(0, k * step, step)
    values = np.random.default_rng(rank).random(k, np.float32) + (2 if rank == 0 else 1)
    regions = Regions()
    bounds = [region * _OF_REGION * step for region in range(size + 1)]
    regions.resume({"cut": [bounds, list(range(size))], "served": 1, "fullest": 1.0})
    return SparseVector(indices.astype(np.int32), values, k * step), regions


def own_call_seconds(stopwatch: Clock, random: np.random.Generator) -> tuple[float, float, float]:
    """Return the seconds of a swap of very short lists after a rest, of one list more, of a send.

    A reduction follows a backward pass, and a swap a wait, so their calls find the caches cold.
    Lists that are decoded one after the other find them warm.
    """
    here, there = local_world(2)
    mine = picks(_FEW, random)
    message = wire.encode(mine, mine.entries, EXACT).message

    def swap() -> float:
        there.send(message, 0)()
        time.sleep(_REST_SECONDS)
        begun = stopwatch()
        reduce(mine, mine.entries, here)
        there.receive(0)
        return stopwatch() - begun

    def read() -> float:
        begun = stopwatch()
        wire.decode(message, mine, mine.entries, 0, EXACT)
        return stopwatch() - begun

    def send() -> float:
        begun = stopwatch()
        encoded = wire.encode(mine, mine.entries, EXACT)
        rounding_error(mine, encoded.vector, EXACT)
        here.send(encoded.message, 1)()
        took = stopwatch() - begun
        there.receive(0)
        return took

    def least(go: Callable[[], float]) -> float:
        return min(go() for _ in range(REPEATS))  # disturbances only make a go longer

    return least(swap), least(read), least(send)


def measure_calls(
    transport: Transport, network: Network, rates: Rates, clock: Clock = time.perf_counter
) -> Rates:
    """Return the rates with the per-call seconds of lists, measured on all ranks after a rest.

    They are the median of a few goes, less the time of messages and entries. Algorithms take turns,
    so that a disturbance does not lengthen most goes of one. Every rank must call it, and gets the
    same. A rank that is alone keeps its own measurement.
    """
    if transport.size == 1:
        return rates
    inside = network.ranks_per_node > 1
    group = transport.subset(transport.node()) if inside else transport
    size = network.ranks_per_node if inside else network.ranks
    is_full = group.size == size  # else of a node with fewer ranks than others
    circle = _Circle(group)
    mine = picks(_FEW, np.random.default_rng(transport.rank))
    # Any format: the lists are too short for its rates to matter.
    format = next(iter(rates.coding))
    few = group.subset(range(min(size, _MOST))) if is_full and group.rank < _MOST else None

    def go(
        algorithm: str,
        picked: SparseVector,
        among: Transport,
        within: Transport | None = group,
        **options: Any,
    ) -> float:
        """Return the mean seconds of the ranks `within`, which leave a barrier together."""
        time.sleep(_REST_SECONDS)
        # A rank that takes no part must still agree on the mean: that is a collective of all.
        if within is None:
            return agree_on_mean(transport, math.nan)
        within.barrier()
        begun = clock()
        if is_full:
            ALGORITHMS[algorithm](picked, picked.entries, among, format=format, **options)
        return agree_on_mean(transport, clock() - begun if is_full else math.nan)

    goes: list[list[float]] = []
    while len(goes) < _GOES and sum(map(sum, goes)) < CALLS_SECONDS:
        swap = go("gtopk", mine, cast("Transport", circle))
        goes.append([swap, go("topk-allgather", mine, group)])
    swapped, gathered = map(statistics.median, zip(*goes, strict=True))
    among = min(size, _MOST)
    # Ranks beyond take no part: any list will do for them.
    even, regions = even_picks(min(group.rank, _MOST - 1), among)
    split = partial(go, "oktopk", even, few or group, few, regions=regions)
    split()  # each sends to each: it may open the connections
    splits: list[float] = []
    while len(splits) < _GOES and sum(splits) < CALLS_SECONDS:
        splits.append(split())
    link, known = network.link(int(not inside)), rates.without_calls()
    for algorithm, picked, took, ranks, of_each, counted in (
        ("gtopk", mine, swapped, _paired(size), "swap_seconds", "swaps"),
        ("topk-allgather", mine, gathered, size, "list_seconds", "others"),
        ("oktopk", even, statistics.median(splits), among, "send_seconds", "sends"),
    ):
        length, k = picked.length, picked.entries
        candidate = Candidate(algorithm, k / length, format)
        expected = predict(candidate, length, Network(ranks, link), known).exchange_seconds
        steps = SCHEDULES[algorithm](Order(length, k, ranks))
        lists = sum(step.times * getattr(step, counted) for step in steps)
        # In this order: what an algorithm is expected to take uses what the one before has told.
        known = known._replace(**{of_each: max(0.0, took - expected) / lists})
    return known


def _paired(size: int) -> int:
    """Return how many of `size` ranks `gtopk` pairs: the largest power of two."""
    return 1 << (size.bit_length() - 1)


class _Circle(Endpoint):
    """The endpoint of a circle: as many ranks as `gtopk` pairs, where each has the number 0.

    A message to rank d goes to the rank d places ahead; one from rank d comes from d places behind.
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
