"""Traces: every rank's sends and receives in a reduction, in order, recorded from its real code.

    rank 0    to 1: 820 bytes | from 1 | to 2: 820 bytes | from 2
    rank 1    to 0: 820 bytes | from 0 | to 3: 820 bytes | from 3

The ranks are threads. Where their vectors together would not fit into memory, two smaller
reductions of the same density are recorded: they have the same messages, and a message's bytes are
a + b k. For topk-allgather these are two allgathers of shorter messages, as its lists travel
unchanged. Dense messages are in one piece, without their checksums; a word answers each long one.
Picks are synthetic: uniform positions, each rank's own, that hardly overlap.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from collectives import run_ranks
from collectives.algorithms import ALGORITHMS, Regions
from collectives.algorithms.regions import QUANTILES_PER_RANK
from collectives.cost_model.schedules import SCHEDULES, Order
from collectives.transports import LocalTransport, Transport, local_world
from collectives.transports.reductions import CHECKED_BYTES, CHECKSUM_BYTES, LONG_BYTES, PIECE_BYTES
from collectives.vector import Array
from collectives.wire import EXACT, Format, encode
from gtopk.cli.bench.collectives.cases import picks

# A peer, and the bytes of a message to it; RECEIVED where one came from it.
Event = tuple[int, int]
RECEIVED: Final = -1


class Recorder(LocalTransport):
    """Notes all messages of a rank, those of its views included.

    events:   in their order.
    computed: seconds of its thread's processor time before each event, since the one before.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[Event] = []
        self.computed: list[float] = []
        self._since = 0.0

    def begin(self) -> None:
        """Clear the record; call it in the thread whose events follow."""
        self.events.clear()
        self.computed.clear()
        self._since = time.thread_time()

    def computed_since(self) -> float:
        """Return the seconds since the last event, and reset them."""
        since, self._since = self._since, time.thread_time()
        return self._since - since

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        self.computed.append(self.computed_since())
        self.events.append((to, message.nbytes))
        return super().send_on(stream, message, to)

    def receive_on(self, stream: Transport, source: int) -> Array:
        self.computed.append(self.computed_since())
        message = super().receive_on(stream, source)
        self._since = time.thread_time()  # waiting does not count as computing
        self.events.append((source, RECEIVED))
        return message


# An event: a message's peer and the bytes sent, or RECEIVED for a received message.
Trace = list[list[Event]]
# For each rank, the seconds that it computes before each of its events, and after the last.
Profile = list[list[float]]

MOST_MESSAGES: Final = 1 << 19
_MOST_ENTRIES: Final = 1 << 25  # that all ranks may hold together after gathering
_FLOAT_BYTES: Final = 4
_WIDE: Final = 1 << 31  # from this many elements on, a position takes 8 bytes instead of 4
_TIMEOUT_SECONDS: Final = 600.0
_STACK_BYTES: Final = 1 << 18  # per rank: thousands of the usual 8 MB would not fit
# How long a waiting thread waits before it asks for Python's lock. Thousands of threads that ask
# 200 times a second get nothing else done.
_TURN_SECONDS: Final = 0.5


class Reduction(NamedTuple):
    """The reduction to record: `selected` of `length` values on each rank; dense: all of them.

    growth: the growth of gtopk, also between nodes.
    native_bytes: as in `Order`: from this size on, dense messages get no answering word.
    """

    algorithm: str
    ranks: int
    length: int
    selected: int
    ranks_per_node: int = 1
    format: Format = EXACT
    growth: float = 1.0
    native_bytes: int = sys.maxsize

    @property
    def messages(self) -> int:
        """Return the approximate number of messages, without the words that answer dense ones."""
        order = Order(self.length, self.selected, self.ranks, self.ranks_per_node)
        return sum(
            each.senders * each.times
            for each in SCHEDULES[self.algorithm](order)
            if each.plain_bytes or self.algorithm != "dense"
        )

    @property
    def entries(self) -> int:
        """Return the number of entries that all ranks hold together at the end."""
        if self.algorithm == "dense":
            return self.ranks * self.length
        gathered = self.ranks if self.algorithm == "topk-allgather" else self.growth
        return round(self.ranks * gathered * self.selected)

    def smaller(self) -> tuple[Reduction, Reduction]:
        """Return two reductions at the same density: one whose entries fit, and one half as large.

        A vector whose raw positions take 8 bytes stays longer than 2^31. Dense reductions have
        equal parts for all ranks, as a remainder would weigh too much; no part is as short as a
        word, and messages are sent in one piece.
        """
        if self.algorithm == "dense":
            most = min(_MOST_ENTRIES // self.ranks, PIECE_BYTES // _FLOAT_BYTES)
            part = max(2 * CHECKSUM_BYTES // _FLOAT_BYTES + 2, most // self.ranks)
            lengths = [part * self.ranks, part // 2 * self.ranks]
            large, small = (self._replace(length=n, selected=n) for n in lengths)
            return large, small
        times = -(-self.entries // _MOST_ENTRIES)
        least = _WIDE if self.format.indices == "raw" and self.length >= _WIDE else 0
        large, small = (
            self._replace(length=max(self.length // n, least), selected=self.selected // n)
            for n in (times, 2 * times)
        )
        return large, small


def trace_of(reduction: Reduction) -> Trace:
    """Return the trace of a reduction.

    Raises ValueError if it has too many messages or quantile boundaries.
    """
    if reduction.ranks > MOST_MESSAGES:  # each rank sends one at least; counting takes too long
        raise ValueError(
            f"{reduction.algorithm} on {reduction.ranks:,} ranks has more than {MOST_MESSAGES:,} "
            "messages, the most that can be replayed"
        )
    if reduction.messages > MOST_MESSAGES:
        raise ValueError(
            f"{reduction.algorithm} on {reduction.ranks:,} ranks has about "
            f"{reduction.messages:,} messages, but at most {MOST_MESSAGES:,} can be replayed"
        )
    if reduction.algorithm == "oktopk" and _boundaries(reduction.ranks) > _MOST_ENTRIES:
        raise ValueError(
            f"oktopk on {reduction.ranks:,} ranks has {_boundaries(reduction.ranks):,} quantile "
            f"boundaries, all in this machine's memory, but at most {_MOST_ENTRIES:,} fit: use "
            "fewer ranks"
        )
    trace = _sized(reduction)
    if reduction.algorithm == "dense" and reduction.length * _FLOAT_BYTES < reduction.native_bytes:
        return _answered(trace)
    return trace


def _sized(reduction: Reduction) -> Trace:
    """Record a reduction, or extrapolate it from smaller ones if it does not fit.

    Dense ones whose messages are sent in pieces are extrapolated, too: only the last piece's word
    takes time.
    """
    in_pieces = reduction.algorithm == "dense" and reduction.length * _FLOAT_BYTES > PIECE_BYTES
    if reduction.entries <= _MOST_ENTRIES and not in_pieces:
        return _record(reduction)
    if reduction.algorithm == "topk-allgather":
        return _allgather(reduction)
    large, small = reduction.smaller()
    traces = _record(small), _record(large)
    return _extrapolated(*traces, small.selected, large.selected, reduction.selected)


def _boundaries(ranks: int) -> int:
    """Return how many quantile boundaries all ranks of Ok-Topk hold: each holds those of all."""
    return ranks * ranks * QUANTILES_PER_RANK * ranks


def _record(reduction: Reduction) -> Trace:
    """Run a reduction on threads, and return its trace."""

    def program(transport: Recorder) -> None:
        if reduction.algorithm == "dense":
            transport.allreduce(np.zeros(reduction.length, np.float32))
            return
        # Ok-Topk's second step is like most of its steps: it keeps its boundaries.
        _reduce(reduction, transport, times=2 if reduction.algorithm == "oktopk" else 1)

    trace = _run(reduction.ranks, program)
    return _without_words(trace) if reduction.algorithm == "dense" else trace


def _reduce(reduction: Reduction, transport: Recorder, times: int) -> None:
    """Run a sparse reduction several times, and record the last one."""
    ranks = range(reduction.ranks)
    options: dict[str, Any] = {}
    if reduction.algorithm == "hierarchical":
        step = reduction.ranks_per_node
        options = {"nodes": [list(ranks[first : first + step]) for first in ranks[::step]]}
    if reduction.algorithm in ("gtopk", "hierarchical"):
        options["growth"] = reduction.growth
    if reduction.algorithm == "oktopk":
        options["regions"] = Regions()
    reduce: Any = partial(ALGORITHMS[reduction.algorithm], format=reduction.format, **options)
    selected = picks("uniform", reduction.length, reduction.selected, transport.rank, seed=0)
    for _ in range(times):
        transport.begin()
        reduce(selected, reduction.selected, transport)


def profile_of(reduction: Reduction) -> Profile:
    """Return the seconds that ranks of a sparse reduction compute between messages, measured here.

    They are the threads' CPU seconds in a second run. They show how a reduction's time is
    distributed, not how long it takes on another machine. If it does not fit, a smaller one runs.
    """
    if reduction.entries > _MOST_ENTRIES:
        reduction, _ = reduction.smaller()

    def program(transport: LocalTransport) -> list[float]:
        assert isinstance(transport, Recorder)
        _reduce(reduction, transport, times=2)
        return [*transport.computed, transport.computed_since()]

    return run_ranks(_recorders(reduction.ranks), program)


def _allgather(reduction: Reduction) -> Trace:
    """Return the trace of an allgather with messages as long as rank 0's list."""

    def recorded(size: int) -> Trace:
        message = np.zeros(size, np.uint8)
        return _run(reduction.ranks, lambda transport: transport.allgather(message))

    return _extrapolated(recorded(1), recorded(2), 1, 2, _list_bytes(reduction))


def _list_bytes(reduction: Reduction) -> int:
    """Return the bytes of rank 0's list, extrapolated from two shorter ones if it does not fit."""
    if reduction.selected <= _MOST_ENTRIES // 4:
        selected = picks("uniform", reduction.length, reduction.selected, rank=0, seed=0)
        return encode(selected, reduction.selected, reduction.format).message.size
    large, small = reduction._replace(ranks=4).smaller()
    large_bytes, small_bytes = _list_bytes(large), _list_bytes(small)
    share = (reduction.selected - large.selected) / (large.selected - small.selected)
    return round(large_bytes + share * (large_bytes - small_bytes))


def _run(ranks: int, program: Callable[[Recorder], object]) -> Trace:
    """Run a program on ranks that are threads, and return their trace."""

    def recorded(transport: LocalTransport) -> list[Event]:
        assert isinstance(transport, Recorder)
        program(transport)
        return transport.events

    stack_bytes, turn_seconds = threading.stack_size(_STACK_BYTES), sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        return run_ranks(_recorders(ranks), recorded)
    finally:
        threading.stack_size(stack_bytes)
        sys.setswitchinterval(turn_seconds)


def _recorders(ranks: int) -> list[LocalTransport]:
    return local_world(ranks, _TIMEOUT_SECONDS, kind=Recorder, announces_waits=False)


def _without_words(trace: Trace) -> Trace:
    """Return the trace of a dense reduction without checksums and without words for long messages.

    Whether a message has either depends on the vector's size; `_answered` adds the words for the
    requested size. A message as long as a checksum is one if the previous message to the same peer
    is long enough to have one. An empty message is a word if any message is long; otherwise it is a
    block without elements.
    """
    longest_bytes = max((size for events in trace for _, size in events), default=0)
    has_words = longest_bytes >= LONG_BYTES
    words: dict[tuple[int, int], deque[bool]] = defaultdict(deque)  # for each message, in order
    kept: list[list[Event]] = []
    for rank, events in enumerate(trace):
        kept.append([])
        last: dict[int, int] = defaultdict(int)  # bytes of the previous message to each peer
        for peer, size in events:
            if size == RECEIVED:
                kept[rank].append((peer, size))
                continue
            is_checksum = size == CHECKSUM_BYTES and last[peer] >= CHECKED_BYTES
            last[peer] = size
            words[rank, peer].append(is_checksum or (has_words and size == 0))
            if not words[rank, peer][-1]:
                kept[rank].append((peer, size))
    return [
        [each for each in events if each[1] != RECEIVED or not words[each[0], rank].popleft()]
        for rank, events in enumerate(kept)
    ]


def _answered(trace: Trace) -> Trace:
    """Return the trace of a dense reduction with a word for every long message.

    rank    sends, receives    sends a word for a long one, waits for that of its own    sends ...
    """
    sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # bytes of each message, in order
    for rank, events in enumerate(trace):
        for peer, size in events:
            if size != RECEIVED:
                sent[rank, peer].append(size)
    answered: Trace = []
    for rank, events in enumerate(trace):
        answered.append([])
        for (to, size), (source, received) in zip(events[::2], events[1::2], strict=True):
            answered[rank] += [(to, size), (source, received)]
            if sent[source, rank].popleft() >= LONG_BYTES:
                answered[rank].append((source, 0))
            if size >= LONG_BYTES:
                answered[rank].append((to, RECEIVED))
    return answered


def _extrapolated(first: Trace, second: Trace, small: int, large: int, size: int) -> Trace:
    """Return the trace at `size`, extrapolated from those at two smaller sizes."""
    if [_pattern(events) for events in first] != [_pattern(events) for events in second]:
        raise ValueError(
            f"the messages on {len(first):,} ranks depend on the size of the vector: use fewer "
            "ranks"
        )
    share = (size - large) / (large - small)

    def extrapolate(one: Event, two: Event) -> Event:
        (peer, little), (_, much) = one, two
        if little == RECEIVED:
            return one
        return peer, max(0, round(much + share * (much - little)))

    return [
        [extrapolate(one, two) for one, two in zip(*rank, strict=True)]
        for rank in zip(first, second, strict=True)
    ]


def _pattern(events: Sequence[Event]) -> list[tuple[int, bool]]:
    return [(peer, size == RECEIVED) for peer, size in events]
