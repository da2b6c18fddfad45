"""Ledger: notes which worker holds which of an epoch's samples, so that none is lost if it dies.

A worker claims the next places of the epoch's order, and the ledger notes its number at each. When
the samples are computed and applied, they are noted as done. When nothing is left to claim, the
workers look for places of workers that have died, and share them out again:

    order    | done done done | of 2 | done | of 1, dead | done | of 0 | not claimed yet ...
                                             `--> of 0                  ^ next

A worker announces under the lock that it holds nothing any more, and others read this under the
lock, so that they see its earlier writes on every kind of processor.

A round is an epoch or an evaluation; round 1 is the time before them. The notes of two rounds
alternate in memory: while a worker waits for one round's end, another may have begun the next.

WorkerTable: a row for each worker of a node, in shared memory, with its counts and its device
    class.

A worker's device class decides how it updates the model, and its batch sizes.

Only its worker writes a row, eight bytes at a time; every worker may read all rows at any time. The
exception: the worker that prepares a round clears the sums of an evaluation in all rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from collectives.errors import MismatchError, PeerError, PeerTimeoutError
from collectives.transports import Counter
from collectives.transports.counters import NodeMemory

# The device classes, and which are fast. Fast workers compute on copies of the parameters, in
# large batches, and evaluate losses. Slow ones compute on the shared model, in small batches.
IS_FAST: Final[Mapping[str, bool]] = {
    "cpu": False,
    "gpu": True,
    # For ranks on CPUs that act like the two above, to try the modes without a GPU.
    "slow": False,
    "fast": True,
}
NAMES: Final = tuple(IS_FAST)  # shared memory holds a class as its index here


def require_class(name: str) -> None:
    """Raise ValueError for an unknown device class."""
    if name not in NAMES:
        raise ValueError(f"a device class must be one of {', '.join(NAMES)}, got {name!r}")


def device_class_of(parameters: Sequence[torch.Tensor], name: str | None) -> str:
    """Return this worker's class: the given one, or the one that its parameters' device implies.

    Raises ValueError if the parameters' devices do not fit the class.
    """
    devices = sorted({parameter.device.type for parameter in parameters})
    if devices not in (["cpu"], ["cuda"]):
        raise ValueError(
            "a worker of hogbatch computes on one device, the CPU or a GPU; its parameters are on "
            f"{', '.join(devices)}"
        )
    on_gpu = devices == ["cuda"]
    chosen = name or ("gpu" if on_gpu else "cpu")
    if on_gpu != (chosen == "gpu"):
        raise ValueError(
            f"a worker of device class {chosen!r} must have its parameters on "
            f"{'a GPU' if chosen == 'gpu' else 'the CPU'}, and they are on {devices[0]}"
        )
    return chosen


NAME_BYTES, FAILURE_BYTES = 160, 480
HEAD: Final = np.dtype(
    [
        *((field, "i8") for field in ("prepared", "next", "end", "base", "turn", "merged")),
        ("smallest", "i8", (len(NAMES),)),  # batch by device class
        ("what", f"S{NAME_BYTES}"),  # the round's name
        ("failure", f"S{FAILURE_BYTES}"),  # why all must stop
        ("has_failed", "i8"),
        ("", "V296"),  # so that rows start at a cache line
    ]
)
_FIELDS: Final = (
    "kind",  # the device class
    "idle",  # the last round in which it had no samples left
    "over",  # the last round it has ended
    "updates",
    "samples",
    "unused",  # batches for which the script took no step
    "skipped",  # updates that were not finite
    "taken_over",  # samples of workers that died or left the loop
    "overlapped",  # updates during which another worker wrote, too
    "writes_begun",  # to the model
    "writes_ended",
    "staleness",  # sum, over the updates, of others' updates since the batch was handed out
    "stalest",
    "size",  # of its next batch
    "smallest",
    "largest",
    "busy",  # nanoseconds from hand-overs to the ends of steps
    "in_rounds",  # nanoseconds within rounds
)
# Rows have their own cache lines; otherwise neighbours would slow each other down.
ROW: Final = np.dtype(
    {
        "names": [*_FIELDS, "losses", "evaluated"],  # an evaluation's sums, by parity of rounds
        "formats": ["i8"] * len(_FIELDS) + ["(2,)f8", "(2,)i8"],
        "itemsize": 256,
    }
)


class WorkerTable:
    """The workers' rows, and the head that they share.

    rows: ROW [workers]; head: HEAD [1]; place: this worker's.
    gone: the places of workers that have died, or left, within a round.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self.head = memory.bytes[: HEAD.itemsize].view(HEAD)
        end = self.size_bytes(memory.places)
        self.rows: np.ndarray[Any, Any] = memory.bytes[HEAD.itemsize : end].view(ROW)
        self.place = memory.place
        self.gone: set[int] = set()

    @staticmethod
    def size_bytes(workers: int) -> int:
        """Return the size of the table in bytes."""
        return HEAD.itemsize + workers * ROW.itemsize

    def __getitem__(self, field: str) -> int:
        """Return a field of this worker's row."""
        return int(self.rows[field][self.place])

    def __setitem__(self, field: str, value: int) -> None:
        self.rows[field][self.place] = value

    def add(self, field: str, amount: int) -> None:
        """Add to a field of this worker's row."""
        self.rows[field][self.place] += amount

    def total(self, field: str) -> int:
        """Return a field's sum over all workers; the sum of "updates" is the model's version."""
        return int(self.rows[field].sum())

    def others(self) -> list[int]:
        """Return the places of the other workers that still take part."""
        places = set(range(self._memory.places)) - self.gone - {self.place}
        return [place for place in sorted(places) if self._memory.is_present(place)]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the model in this context; count the update if another worker writes meanwhile.

        If two workers write an element in the same nanoseconds, one addition is lost. Nothing else
        is ever lost, so only updates counted here can lose a part of themselves.
        """
        others = self.others()
        # Begun writes first: the sum at the end finds a write that begins after this sum.
        begun = self._sum("writes_begun", others)
        beside_others = self._sum("writes_ended", others) < begun
        self.add("writes_begun", 1)
        try:
            yield
        finally:
            self.add("writes_ended", 1)
            if beside_others or self._sum("writes_begun", others) > begun:
                self.add("overlapped", 1)

    def _sum(self, field: str, places: list[int]) -> int:
        return int(self.rows[field][places].sum()) if places else 0


_DONE, _GIVEN_BACK = -1, -2
_MISMATCHED, _FAILED = 1, 2  # why the workers stop
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-4, 2e-2


class Ledger:
    """One worker's view of the ledger.

    Each round: `begin`, then `claim` and `finish` until nothing is left, `reclaim` likewise, `end`.

    notes: int16 [2, length]; 0: not claimed, -1: done, -2: given back, else a worker's place + 1.
    counter: several nodes share it, and each takes stretches from it; None: one node.
    departure_reason: maps a worker's place to the known reason of its end; "": none is known. A
              worker that has left, is frozen or cannot be reached is given up, although its
              process lives.
    on_death: called once with the place of a worker that has died, or left, within a round.
    """

    def __init__(
        self,
        memory: NodeMemory,
        table: WorkerTable,
        notes: np.ndarray[Any, Any],
        counter: Counter | None = None,
        stretch: int = 0,
        *,
        ranks_may_leave: bool = False,
        ranks: Sequence[int],
        timeout_seconds: float = 600.0,
        departure_reason: Callable[[int], str] = lambda place: "",
        on_death: Callable[[int], None] = lambda place: None,
    ) -> None:
        self._memory, self._workers, self._all_notes = memory, table, notes
        self._counter, self._stretch = counter, stretch
        self._ranks_may_leave = ranks_may_leave
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._departure_reason, self._on_death = departure_reason, on_death
        self._head = table.head
        self._number = table.place + 1
        self.round = 1  # round 1 ends when the worker is ready to begin

    @property
    def _notes(self) -> np.ndarray[Any, Any]:
        notes: np.ndarray[Any, Any] = self._all_notes[self.round % 2]
        return notes

    def begin(self, length: int, what: str = "", *, between_nodes: bool = True) -> None:
        """Begin the next round, of `length` places, when all others have ended the last one.

        what: names the round, equal on all workers. Raises MismatchError, on all of them from then
              on, if one begins another round.
        """
        self._await(lambda: self._all_have("over", self.round), "end the last round")
        self.round += 1
        self._length = length
        self._between_nodes = between_nodes and self._counter is not None
        name = what.encode()[:NAME_BYTES]
        with self._memory.lock():
            if self._head["prepared"][0] < self.round:
                self._notes[:length] = 0
                self._head["next"][0] = self._head["turn"][0] = 0
                self._head["end"][0] = 0 if self._between_nodes else length
                # Also in the rows of dead workers: an evaluation adds up all rows.
                self._workers.rows["losses"][:, self.round % 2] = 0
                self._workers.rows["evaluated"][:, self.round % 2] = 0
                self._head["what"][0] = name
                self._head["prepared"][0] = self.round
            elif (other := self._head["what"][0]) != name:
                self._note_failure(_MISMATCHED, f"{other.decode()} and {what}")
        self.require_healthy()

    def before_next_round(self, act: Callable[[], None]) -> None:
        """Call `act` unless a worker of this node has begun the next round already."""
        with self._memory.lock():
            if self._head["prepared"][0] <= self.round:
                act()

    def fail(self, why: str) -> None:
        """Stop all workers of this node: each raises PeerError with this reason."""
        with self._memory.lock():
            self._note_failure(_FAILED, why)

    def _note_failure(self, kind: int, text: str) -> None:
        """Note why all must stop, unless an earlier reason is noted; call it under the lock."""
        if self.is_healthy:
            self._head["failure"][0] = text.encode("ascii", "replace")[:FAILURE_BYTES]
            self._head["has_failed"][0] = kind

    @property
    def is_healthy(self) -> bool:
        """Tell whether the workers of this node can continue."""
        return not self._head["has_failed"][0]

    def require_healthy(self) -> None:
        """Raise MismatchError if different rounds have begun, PeerError if a worker has failed."""
        if self.is_healthy:
            return
        with self._memory.lock():
            kind, text = self._head["has_failed"][0], self._head["failure"][0].decode()
        here = f"rank {self._ranks[self._workers.place]}"
        if kind == _FAILED:
            raise PeerError(f"{here} cannot continue: {text}")
        raise MismatchError(
            f"{here}: the ranks of this host have begun {text} at the same time; an epoch must "
            "have the same order of samples on all ranks (order=, the sampler's seed, set_epoch), "
            "an evaluation the same number of samples and batch size"
        )

    def claim(self, count: int) -> range:
        """Claim and return the next places, at most `count`; empty when all are claimed."""
        self.require_healthy()
        with self._memory.lock():
            first = int(self._head["next"][0])
            if first == int(self._head["end"][0]) and self._between_nodes:
                first = self._take_stretch()
            last = min(first + count, int(self._head["end"][0]))
            # First note, then advance: if a worker dies in between, others overwrite its notes.
            self._notes[first:last] = self._number
            self._head["next"][0] = last
        return range(first, last)

    def _take_stretch(self) -> int:
        """Take the next stretch of places from the counter of all nodes; return its first place."""
        assert self._counter is not None
        first = self._counter.add(self._stretch) - int(self._head["base"][0])
        first = min(first, self._length)
        self._head["next"][0] = first
        self._head["end"][0] = min(first + self._stretch, self._length)
        return first

    def finish(self, places: Sequence[int]) -> None:
        self._notes[list(places)] = _DONE

    def reclaim(self, count: int) -> list[int]:
        """Claim places of dead workers, or places that were given back; return at most `count`.

        Waits while others still compute. Empty when everything claimed is done.
        """
        table = self._workers
        self._mark_round("idle")
        found: list[int] = []

        def is_over() -> bool:
            others = table.others()
            with self._memory.lock():
                idle = all(table.rows["idle"][place] >= self.round for place in others)
                if lost := self._lost_places({*others, table.place}):
                    self._report_dead_workers()
                    found.extend(lost[:count])
                    self._notes[found] = self._number
                    # Under the same lock: the others then wait for these places, and take them over
                    # if this worker dies, too.
                    table["idle"] = self.round - 1
            return bool(found) or idle

        self._await(is_over, "finish their batches")
        if found:
            table.add("taken_over", len(found))
        return found

    def await_claims(self, workers: Callable[[], Sequence[int]]) -> None:
        """Wait until everything is claimed, or none of the given workers is left.

        workers: returns the places of these workers.
        """

        def has_advanced(claimed: int) -> bool:
            return not workers() or bool(self._head["next"][0] > claimed)

        # Read once: between two reads the last places may be claimed. This worker would then wait
        # for one more claim, which never comes, and the others would wait for this worker.
        while workers() and (claimed := int(self._head["next"][0])) < self._head["end"][0]:
            self._await(partial(has_advanced, claimed), "evaluate", workers)

    def await_others(self) -> None:
        """Wait until no worker of this node has samples left; take over none of them."""
        self._mark_round("idle")
        self._await(lambda: self._all_have("idle", self.round), "finish their batches")

    def _lost_places(self, living: set[int]) -> list[int]:
        """Return places that dead workers claimed and did not finish, or that were given back."""
        numbers = [place + 1 for place in range(self._memory.places) if place not in living]
        notes = self._notes[: self._length]
        lost: list[int] = np.flatnonzero(np.isin(notes, [*numbers, _GIVEN_BACK])).tolist()
        return lost

    def give_back(self, places: Sequence[int]) -> None:
        """Give places that this worker has claimed to workers that still compute."""
        if places:
            with self._memory.lock():
                self._notes[list(places)] = _GIVEN_BACK

    def end(self) -> None:
        """Announce that this worker has ended the round."""
        self._mark_round("idle", "over")

    def _mark_round(self, *fields: str) -> None:
        """Set fields of this worker's row to the round's number, under the lock."""
        with self._memory.lock():
            for field in fields:
                self._workers[field] = self.round

    def take_turn(self) -> None:
        """Wait for this worker's turn, in lock-step: workers compute one after the other."""

        def is_own_turn() -> bool:
            head, table = self._head, self._workers
            with self._memory.lock():
                others = set(table.others())
                while (turn := int(head["turn"][0])) != table.place:
                    if turn in others and table.rows["idle"][turn] < self.round:
                        return False
                    head["turn"][0] = (turn + 1) % self._memory.places
            return True

        self._await(is_own_turn, "take their turns")

    def pass_turn(self) -> None:
        """Pass the turn to the next worker, if it is this worker's turn."""
        if self._head["turn"][0] == self._workers.place:
            self._head["turn"][0] = (self._workers.place + 1) % self._memory.places

    def _all_have(self, field: str, round: int) -> bool:
        others, rows = self._workers.others(), self._workers.rows[field]
        with self._memory.lock():
            return all(rows[place] >= round for place in others)

    def _await(
        self,
        condition: Callable[[], bool],
        what: str,
        workers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Poll `condition` until it returns true.

        workers: returns the places of the workers waited for; None: those that still compute.
        Raises PeerError if a worker has left that must not, PeerTimeoutError after the timeout.
        """
        begun = time.monotonic()
        while True:
            self.require_healthy()
            # First: `condition` does not wait for dead workers. If ranks may not leave, the next
            # line raises, so a round that ended only because a worker died does not count as over.
            is_over = condition()
            self._report_dead_workers()
            if is_over:
                return
            waited_seconds = time.monotonic() - begun
            if waited_seconds > self._timeout_seconds:
                late = [self._ranks[place] for place in (workers or self._busy_workers)()]
                raise PeerTimeoutError(
                    f"rank {self._ranks[self._workers.place]} has waited "
                    f"{self._timeout_seconds:g} s for ranks {late} to {what}"
                )
            time.sleep(pause_seconds(waited_seconds))

    def _busy_workers(self) -> list[int]:
        """Return the places of the other workers that may have samples left."""
        idle = self._workers.rows["idle"]
        return [place for place in self._workers.others() if idle[place] < self.round]

    def _report_dead_workers(self) -> None:
        """Report workers that have died since the last call; raise PeerError if none may die."""
        for place in range(self._memory.places):
            if place in self._workers.gone or place == self._workers.place:
                continue
            is_present = self._memory.is_present(place)
            why = self._departure_reason(place)
            # Read last: a worker that has ended its round may leave at any time, and is not dead.
            if self._workers.rows["over"][place] >= self.round:
                continue
            if is_present and not why:
                continue
            if not self._ranks_may_leave:
                raise PeerError(
                    f"rank {self._ranks[place]} left ({why or 'its process has died'}) in the "
                    "middle of an epoch; to continue without ranks that die, use "
                    "adapt(..., ranks_may_leave=True)"
                )
            # Also if its process lives: it may wait for the others, in shutdown() or at its end.
            self._workers.gone.add(place)
            self._on_death(place)


def pause_seconds(waited_seconds: float) -> float:
    """Return the pause before the next poll; it grows with the wait, because polls cost time."""
    return max(_SHORTEST_PAUSE_SECONDS, min(waited_seconds / 16, _LONGEST_PAUSE_SECONDS))
