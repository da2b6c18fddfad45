"""Readiness table: which ranks are ready for which operations; the same table on every rank.

Every rank builds it from the announcements of all ranks. Once an operation has run, its name gets a
cache slot: the number of its bit in later announcements. A name without a slot is open while some
ranks are ready for it and others are not.

    slot   name             spec        ready on rank 0 1 2
    0      allreduce.w      float32 [3] ...                1 1 1     on all: run now
    1      allreduce.b      float32 [1] ...                1 0 1     waits for rank 1
    open   broadcast.x      {rank 1: uint8 [8] root_rank=0}          waits for ranks 0 and 2

Nothing here communicates, waits or reads a clock.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from collectives.errors import CollectiveError, MismatchError, PeerError

from .agreement import (
    advice_on,
    advice_on_uneven,
    describe_deadlock,
    describe_mismatch,
    name_ranks,
)
from .operation import EMPTY, Announcement, OperationSpec, Request


class ReadyOperation(NamedTuple):
    """An operation to run now; all_flags: every rank's flags, 0 for a rank that has joined.

    Repeated runs of the same operations return the same objects.
    """

    name: str
    spec: OperationSpec
    all_flags: list[int]


class CycleOutcome(NamedTuple):
    """The result of a cycle, the same on every rank.

    ready:   the operations to run now, in this order.
    refused: names of operations that cannot run, each with its error.
    joined:  the last rank to join, once all have joined; else None.
    left:    a rank that has left, and why; else None. After `ready`, nothing else runs.
    expired: why the job ends, because a rank has waited too long; else None.
    has_changes: whether an announcement may have changed which operations run.
    """

    ready: list[ReadyOperation]
    refused: list[tuple[str, CollectiveError]]
    joined: int | None
    left: tuple[int, str] | None
    expired: str | None
    has_changes: bool


class _CacheSlot(NamedTuple):
    """A name that all ranks know by number; all_flags: each rank's last announced flags."""

    number: int
    name: str
    spec: OperationSpec
    all_flags: list[int]


class _PendingName(NamedTuple):
    """A name that only some ranks are ready for: each ready rank's announcement."""

    specs: dict[int, OperationSpec]
    all_flags: dict[int, int]


class ReadinessTable:
    """Open names and cache slots; `enter` adds a cycle's announcements and returns the outcome.

    ranks: the ranks' numbers in the world, for errors; this class numbers them 0, 1, ...
    """

    def __init__(self, ranks: Sequence[int], capacity: int) -> None:
        self.capacity = capacity  # number of slots; fixed once the first slot is assigned
        self.joined: dict[int, None] = {}
        self._ranks = ranks
        self._size = len(ranks)
        self._slots: list[_CacheSlot | None] = []
        self._named: OrderedDict[str, _CacheSlot] = OrderedDict()  # least recently used first
        self._vacant: list[int] = []
        # The slots that ran last, as bits and as ReadyOperation.
        self._last_run: tuple[int, list[ReadyOperation]] = 0, []
        self._announcements: dict[str, tuple[list[Request], Announcement]] = {}  # by first name
        self._bits = [0] * self._size  # by rank: the slots that it is ready for
        self._open: dict[str, _PendingName] = {}
        self._leaving: dict[int, str] = {}

    @property
    def slots(self) -> int:
        """The number of ready bits in an announcement."""
        return len(self._slots)

    def announcement_of(self, requests: list[Request], rank: int) -> Announcement:
        """Return a rank's announcement of newly ready names, for the next `enter`.

        Reuses the announcement of an equal list; comparing lists of the same objects is quick.
        """
        first = requests[0].name if requests else ""
        before, announced = self._announcements.get(first, ([], EMPTY))
        if before == requests:
            return announced
        ready = 0
        fresh: list[Request] = []
        changed_flags: dict[int, int] = {}
        for each in requests:
            slot = self._named.get(each.name)
            # A known name with a new spec is announced in full; all ranks then free its slot.
            if slot is None or slot.spec != each.spec:
                fresh.append(each)
                continue
            ready |= 1 << slot.number
            if each.flags != slot.all_flags[rank]:
                changed_flags[slot.number] = each.flags
        announcement = Announcement(ready, tuple(fresh), changed_flags)
        if changed_flags:
            self._announcements.clear()  # cached ones lack flags that have changed since
        else:
            self._announcements[first] = requests, announcement
        return announcement

    def names_in(self, announcement: Announcement) -> list[str]:
        """Return the names in an announcement; call before `enter`, which may move slots."""
        cached = [slot.name for slot in self._cached(announcement.ready)]
        return cached + [name for name, _, _ in announcement.fresh]

    def waits(self, rank: int) -> bool:
        """Tell whether a rank has joined or is ready for a name that has not run yet."""
        is_open = any(rank in entry.specs for entry in self._open.values())
        return rank in self.joined or self._bits[rank] != 0 or is_open

    def is_waited_for(self, rank: int) -> bool:
        """Tell whether other ranks are ready for something that this rank is not."""
        if rank in self.joined:
            return False
        union = functools.reduce(int.__or__, self._bits)
        is_open = any(rank not in entry.specs for entry in self._open.values())
        return union & ~self._bits[rank] != 0 or is_open

    def missing(self, name: str) -> list[int]:
        """Return the ranks that a name waits for, as world ranks."""
        ready = self._ready_ranks(name)
        missing = [r for r in range(self._size) if r not in ready and r not in self.joined]
        return [self._ranks[rank] for rank in missing]

    def joined_ranks(self) -> list[int]:
        """Return the joined ranks, as world ranks; callable from any thread."""
        # `list` copies atomically; the engine's thread may add to it meanwhile.
        return [self._ranks[place] for place in list(self.joined)]

    def enter(self, announcements: Sequence[Announcement]) -> CycleOutcome:
        """Enter the ranks' announcements, in rank order; return the outcome."""
        first = announcements[0]
        if first[1:] != EMPTY[1:] or any(other != first for other in announcements):
            return self._enter_any(announcements)
        # The usual case: all ranks became ready for the same cached names. As no rank was ready
        # for them before, no other name changes.
        return CycleOutcome(self._run_slots(first.ready), [], None, None, None, first.ready != 0)

    def _enter_any(self, announcements: Sequence[Announcement]) -> CycleOutcome:
        for rank, announcement in enumerate(announcements):
            # Read the bits of all ranks before freeing any slot below: ranks announced them with
            # the current slot numbers.
            self._bits[rank] |= announcement.ready
            for number, flags in announcement.changed_flags.items():
                slot = self._slots[number]
                assert slot is not None
                slot.all_flags[rank] = flags
                self._last_run = 0, []
        for rank, announcement in enumerate(announcements):
            for name, spec, flags in announcement.fresh:
                self._uncache(name)
                entry = self._open.setdefault(name, _PendingName({}, {}))
                entry.specs[rank] = spec
                entry.all_flags[rank] = flags
        joining = [rank for rank, announcement in enumerate(announcements) if announcement.joins]
        self.joined |= dict.fromkeys(joining)
        for rank, announcement in enumerate(announcements):
            if announcement.leaves is not None:
                self._leaving[rank] = announcement.leaves
        ready, refused = self._take_complete()
        # An operation that became ready in this cycle has not expired.
        expired = next(
            (t for a in announcements for n, t in a.expired.items() if self._ready_ranks(n)), None
        )
        # After collecting the ready ones: a leaving rank still runs what it has announced.
        refused += self._refuse_for_leaving()
        has_changes = any(announcement.has_changes for announcement in announcements)
        # Another rank's announcement in the same cycle may free a rank that reports being stuck.
        if not has_changes:
            refused += self._break_deadlock(announcements)
        return CycleOutcome(
            ready, refused, self._last_joined(joining), self._departed_rank(), expired, has_changes
        )

    def _run_slots(self, bits: int) -> list[ReadyOperation]:
        """Return the operations of these slots, and mark the slots as most recently used."""
        if not bits:  # keep `_last_run` across an idle cycle: the next step will need it again
            return []
        # The same objects as before, so that `Execution` recognises its cached plan.
        if bits == self._last_run[0]:
            return self._last_run[1]
        ready = []
        for slot in self._cached(bits):
            self._named.move_to_end(slot.name)
            ready.append(ReadyOperation(slot.name, slot.spec, slot.all_flags.copy()))
        self._last_run = bits, ready
        return ready

    def _take_complete(self) -> tuple[list[ReadyOperation], list[tuple[str, CollectiveError]]]:
        """Take the names that every rank that has not joined is ready for.

        Returns the operations to run, and the refused ones with their errors.
        """
        required = [rank for rank in range(self._size) if rank not in self.joined]
        waiting = [self._bits[rank] for rank in required]
        combine = int.__and__ if required else int.__or__
        # If all ranks have joined, run everything that any of them submitted before: nobody will
        # submit it later.
        bits = functools.reduce(combine, waiting or self._bits)
        ready, refused = self._pop_slots(bits)
        # A dict keeps insertion order: by rank, then by announcement. It is the same on all ranks,
        # and so is the order of execution.
        for name, entry in list(self._open.items()):
            if any(rank not in entry.specs for rank in required):
                continue
            del self._open[name]
            spec = entry.specs[min(entry.specs)]
            error = self._mismatch_error(name, entry) or self._join_error(name, spec, entry.specs)
            if error is not None:
                refused.append((name, error))
                continue
            all_flags = [entry.all_flags.get(rank, 0) for rank in range(self._size)]
            ready.append(ReadyOperation(name, spec, all_flags))
            # A copy: later announcements change the slot's flags, but not the operation's.
            self._cache(name, spec, all_flags.copy())
        return ready, refused

    def _pop_slots(
        self, bits: int
    ) -> tuple[list[ReadyOperation], list[tuple[str, CollectiveError]]]:
        """Return the operations of these slots: to run, and refused because a rank has joined."""
        # Read before clearing the bits.
        ranks = [self._ready_ranks(slot.name) for slot in self._cached(bits)] if self.joined else []
        self._bits = [rank_bits & ~bits for rank_bits in self._bits]
        if not self.joined:
            return [*self._run_slots(bits)], []
        ready: list[ReadyOperation] = []
        refused: list[tuple[str, CollectiveError]] = []
        for run, present in zip(self._run_slots(bits), ranks, strict=True):
            error = self._join_error(run.name, run.spec, present)
            if error is None:
                # A slot still holds a joined rank's last flags, which no longer count.
                all_flags = [flags if r in present else 0 for r, flags in enumerate(run.all_flags)]
                ready.append(run._replace(all_flags=all_flags))
            else:
                refused.append((run.name, error))
        return ready, refused

    def _cached(self, bits: int) -> Iterable[_CacheSlot]:
        for number in _bit_positions(bits):
            slot = self._slots[number]
            assert slot is not None
            yield slot

    def _mismatch_error(self, name: str, entry: _PendingName) -> MismatchError | None:
        first, *others = entry.specs.values()
        if all(other == first for other in others):
            return None
        announced = {
            self._ranks[rank]: [name, *spec.words()] for rank, spec in sorted(entry.specs.items())
        }
        return MismatchError(describe_mismatch(announced))

    def _join_error(
        self, name: str, spec: OperationSpec, ready_ranks: Iterable[int]
    ) -> MismatchError | None:
        """Return an error if joined ranks cannot take part in this operation, else None."""
        joined = self.joined.keys() - set(ready_ranks)
        if not joined or spec.join_descriptor is not None or spec.dense:
            return None
        who = name_ranks(sorted(self._ranks[rank] for rank in joined))
        return MismatchError(
            f"'{name}' needs every rank, and {who} joined: until every rank has called join(), "
            "only reductions are possible"
        )

    def _refuse_for_leaving(self) -> list[tuple[str, CollectiveError]]:
        """Refuse operations that wait for a leaving rank."""
        refused: list[tuple[str, CollectiveError]] = []
        for rank, reason in self._leaving.items():
            departure = f"rank {self._ranks[rank]} left ({reason}) before"
            union = functools.reduce(int.__or__, self._bits) & ~self._bits[rank]
            names = [slot.name for slot in self._cached(union)]
            names += [name for name, e in self._open.items() if rank not in e.specs]
            self._bits = [rank_bits & ~union for rank_bits in self._bits]
            for name in names:
                self._open.pop(name, None)
                advice = _departure_advice(reason, name)
                why = f"{departure} {name}: gtopk has been shut down there{advice}"
                refused.append((name, PeerError(why)))
        return refused

    def _break_deadlock(
        self, announcements: Sequence[Announcement]
    ) -> list[tuple[str, CollectiveError]]:
        """If all ranks are stuck (a deadlock), refuse the operations that they wait for."""
        stuck = {
            rank: announcement.stuck
            for rank, announcement in enumerate(announcements)
            if rank not in self.joined and rank not in self._leaving
        }
        names = {name for name in stuck.values() if name is not None and self._ready_ranks(name)}
        if not all(name in names for name in stuck.values()):
            return []
        text = describe_deadlock({self._ranks[rank]: name or "" for rank, name in stuck.items()})
        # Sorted: a set's order differs between processes and would decide which slot is reused
        # first. A bit would then stand for different operations on different ranks.
        for name in sorted(names):
            self._uncache(name)
            self._open.pop(name, None)
        return [(name, MismatchError(text)) for name in sorted(names)]

    def _last_joined(self, joining: Sequence[int]) -> int | None:
        if len(self.joined) < self._size:
            return None
        self.joined.clear()
        # If several joined in one cycle, take the highest, so that all ranks return the same one.
        return self._ranks[max(joining)]

    def _departed_rank(self) -> tuple[int, str] | None:
        """Return a leaving rank that has no operation left to run, and its reason."""
        for rank, reason in self._leaving.items():
            is_open = any(rank in entry.specs for entry in self._open.values())
            if self._bits[rank] == 0 and not is_open:
                return self._ranks[rank], reason
        return None

    def _ready_ranks(self, name: str) -> set[int]:
        if name in self._open:
            return set(self._open[name].specs)
        slot = self._named.get(name)
        if slot is None:
            return set()
        return {rank for rank, bits in enumerate(self._bits) if bits >> slot.number & 1}

    def _cache(self, name: str, spec: OperationSpec, all_flags: list[int]) -> None:
        """Give a name a slot: a new one, or that of the least recently used name.

        Slots of names that a rank is ready for are kept; if all are, the name gets none.
        """
        self._invalidate_caches()
        if self._vacant:
            number = self._vacant.pop()
        elif len(self._slots) < self.capacity:
            number = len(self._slots)
            self._slots.append(None)
        else:
            union = functools.reduce(int.__or__, self._bits)
            # Keep a slot while a rank is ready for it: its bit would stand for another name.
            unused = (slot for slot in self._named.values() if not union >> slot.number & 1)
            oldest = next(unused, None)
            if oldest is None:
                return
            del self._named[oldest.name]
            number = oldest.number
        self._slots[number] = self._named[name] = _CacheSlot(number, name, spec, all_flags)

    def _invalidate_caches(self) -> None:
        """Drop cached results that depend on slots, because slots change."""
        self._last_run = 0, []
        self._announcements.clear()

    def _uncache(self, name: str) -> None:
        """Free a name's slot; the name becomes open for the ranks that are ready for it."""
        slot = self._named.pop(name, None)
        if slot is None:
            return
        self._invalidate_caches()
        number = slot.number
        ready = [rank for rank, bits in enumerate(self._bits) if bits >> number & 1]
        self._bits = [bits & ~(1 << number) for bits in self._bits]
        self._slots[number] = None
        self._vacant.append(number)
        self._open[name] = _PendingName(
            dict.fromkeys(ready, slot.spec), {rank: slot.all_flags[rank] for rank in ready}
        )


PROGRAM_ENDED: Final = "its program ended"  # reason of a rank that leaves without a failure


def _departure_advice(reason: str, name: str) -> str:
    """Return advice if a rank ended early without a failure; else "".

    name: the operation that waited for it.
    """
    if not reason.startswith(PROGRAM_ENDED):
        return ""
    return advice_on([name]) or advice_on_uneven(name)


@functools.lru_cache(maxsize=256)
def _bit_positions(bits: int) -> tuple[int, ...]:
    """Return the positions of the set bits, lowest first."""
    positions = []
    while bits:
        lowest = bits & -bits
        positions.append(lowest.bit_length() - 1)
        bits ^= lowest
    return tuple(positions)
