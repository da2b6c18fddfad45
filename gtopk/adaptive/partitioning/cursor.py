"""Cursor: a shared position in a stretch of samples: a rank that is free takes the next ones.

    stretch   |--------------------------------------------------|   places in an epoch's order
    rank 0    |== 32 ==|        |== 32 ==|        |== 32 ==|         takes, in the order of the
    rank 1             |== 32 ==|                          |= 8|     ranks' calls; the last is cut
    rank 2                               |=== 32 ==|                 short, later ones are empty

In any order of calls, the takes are disjoint and cover the stretch. If a rank dies with unfinished
samples, no other rank finishes them, but they can be handed out again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from collectives.transports import Counter

from .cuts import divide

# Maps a stretch's number, its samples and the ranks' sizes to each rank's takes, in their order.
Replay = Callable[[int, int, Sequence[int]], Sequence[Sequence[range]]]


class SampleRange:
    """Places that are handed out together, as consecutive ranges.

    A take is a range of positions in it; `places` maps a take to the places of its samples.
    """

    def __init__(self, ranges: Iterable[range]) -> None:
        self.ranges = [each for each in ranges if each]
        self._ends = list(accumulate(map(len, self.ranges)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def places(self, take: range) -> list[range]:
        """Return the places at these positions."""
        found = []
        for each, end in zip(self.ranges, self._ends, strict=True):
            first = end - len(each)
            part = each[max(take.start - first, 0) : max(take.stop - first, 0)]
            if part:
                found.append(part)
        return found

    def remaining(self, finished: Iterable[range]) -> list[range]:
        """Return the places at all positions outside the finished takes, in order."""
        left, position = [], 0
        for take in sorted(finished, key=lambda take: take.start):
            left += self.places(range(position, take.start))
            position = max(position, take.stop)
        return left + self.places(range(position, len(self)))


class SharedCursor:
    """Takes samples with a counter that the ranks share, in the order of their calls.

    count: the largest count that this rank has seen, over all stretches.
    """

    def __init__(self, counter: Counter) -> None:
        self.count = 0
        self._counter = counter
        # The counter's value at the start of the open stretch. The counter is never reset, because
        # ranks may still be counting.
        self._begin = self._total = 0

    def open(self, number: int, total: int, sizes: Sequence[int], count: int) -> None:
        """Open a stretch, given its number, its samples, and the ranks' sizes in it.

        count: the largest count that any rank has seen, after all ranks have stopped taking.
        """
        self._begin, self._total = count, total

    def take(self, samples: int) -> range:
        """Take the next `samples` samples, or those that are left, or none."""
        # Ranks also count beyond the stretch's end: the next one begins from the largest count.
        before = self._counter.add(samples)
        self.count = before + samples
        first = before - self._begin
        return range(min(first, self._total), min(first + samples, self._total))


class ReplayedCursor:
    """Takes samples in a recorded or computed order: the same takes in every run.

    Every rank knows all takes, so nothing is sent and no rank waits.
    """

    def __init__(self, rank: int, replay: Replay) -> None:
        self.count = 0
        self._rank = rank
        self._replay = replay
        self._takes: Iterator[range] = iter(())
        self._number = 0

    def open(self, number: int, total: int, sizes: Sequence[int], count: int) -> None:
        """Get the stretch's takes from the replay; raise ValueError if they do not cover it."""
        # Checked on every rank before a batch: samples in a gap would be given to nobody.
        takes = self._replay(number, total, sizes)
        check_takes(number, total, takes, len(sizes))
        self._takes, self._number = iter(takes[self._rank]), number

    def take(self, samples: int) -> range:
        """Return the replay's next take; raise ValueError if it exceeds `samples`."""
        take = next(self._takes, range(0))
        if len(take) > samples:
            raise ValueError(
                f"the replay gives rank {self._rank} a take of {len(take)} samples in stretch "
                f"{self._number}, and its size is {samples}: the replay is of another run"
            )
        return take


Cursor = SharedCursor | ReplayedCursor


def check_takes(number: int, total: int, takes: Sequence[Sequence[range]], ranks: int) -> None:
    """Raise ValueError unless `ranks` ranks take each sample of the stretch exactly once."""
    if len(takes) != ranks:
        raise ValueError(f"the replay must be of {ranks} ranks, got one of {len(takes)}")
    position = 0
    for take in sorted((take for each in takes for take in each), key=lambda take: take.start):
        if take.start != position:
            break
        position = take.stop
    if position != total:
        raise ValueError(
            f"the replay's takes of stretch {number} must cover its {total} samples, each once; "
            f"they cover the first {position}"
        )


def recorded(takes: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Replay:
    """Return a replay of a record: for each stretch and rank, the (start, stop) of its takes.

    The record is empty for stretches before the state from which the recorded run resumed.
    """

    def replay(number: int, total: int, sizes: Sequence[int]) -> list[list[range]]:
        if number >= len(takes):
            raise ValueError(f"the record ends after {len(takes)} stretches")
        if not takes[number]:
            raise ValueError(
                f"the record lacks stretch {number}: its run resumed from a later state; start the "
                "replay from that state"
            )
        return [[range(start, stop) for start, stop in each] for each in takes[number]]

    return replay


def by_speed(speeds: Sequence[float]) -> Replay:
    """Return a replay of ranks that take size / speed seconds; ties go to the lower rank."""

    def replay(number: int, total: int, sizes: Sequence[int]) -> list[list[range]]:
        takes: list[list[range]] = [[] for _ in speeds]
        # When each rank is free next; for equal times the heap returns the lower rank.
        free = [(0.0, rank) for rank in range(len(speeds))]
        position = 0
        while position < total:
            second, rank = heapq.heappop(free)
            take = range(position, min(position + sizes[rank], total))
            takes[rank].append(take)
            position = take.stop
            heapq.heappush(free, (second + len(take) / speeds[rank], rank))
        return takes

    return replay


def in_step(number: int, total: int, sizes: Sequence[int]) -> list[list[range]]:
    """Return the takes of ranks that step together, each with a batch of its size."""
    takes: list[list[range]] = [[] for _ in sizes]
    start = 0
    while start < total:
        left = total - start
        # The last step is divided in proportion, so that all ranks still step together.
        parts = divide(left, sizes) if left < sum(sizes) else sizes
        for each, size in zip(takes, parts, strict=True):
            if size:
                each.append(range(start, start + size))
            start += size
    return takes


def record_of(takes: Iterable[Iterable[range]]) -> list[list[list[int]]]:
    """Return the ranks' takes of a stretch as plain numbers, as `recorded` reads them."""
    return [[[take.start, take.stop] for take in each] for each in takes]


def open_cursor(rank: int, counter: Counter | None, replay: Any) -> Cursor:
    """Return the cursor of a replay (a function or a record), or else of a counter."""
    if replay is None:
        assert counter is not None
        return SharedCursor(counter)
    return ReplayedCursor(rank, replay if callable(replay) else recorded(replay))
