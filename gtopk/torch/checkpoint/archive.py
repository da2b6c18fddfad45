"""Archive: the checkpoints in a folder, written and found by all ranks together.

The folder may be one that all hosts share, or each host's own.

    write    every rank writes its part, rank 0 also the state that is equal on all
             -> all learn who failed
    find     all list the parts they see -> the newest whole checkpoint is read
             -> all learn which parts are damaged
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from collectives.transports import Transport

from ...errors import CheckpointError, DamagedError, FormatError
from ...runtime.coordinator import Engine
from ...runtime.coordinator.operation import Operation
from ...runtime.logs import print_line
from ...runtime.world import world
from ..functions import allgather_object, broadcast_object
from ..mpi_ops import rank, size
from .files import (
    ALL,
    LAST_NUMBER,
    Content,
    Part,
    list_parts,
    made,
    missing_parts,
    name_of,
    naming,
    parts_of,
    read_json,
    read_part,
    remove_checkpoints,
    write_part,
)
from .tree import Json, Taken, put_together
from .validation import broadcast_tensors, by_rank, problem_text, run_on_all, take_on_all

_OTHERS: Final = "another job writes to this folder, too"
_APART: Final = (
    "Give each job a folder of its own, or stop the other one and restart this one; dcp.save needs "
    "its own folder, too"
)


class Snapshot(NamedTuple):
    """A rank's part to write: its own values, and on rank 0 those that are equal on all ranks."""

    step: int
    replicated: Taken
    own: Taken


class OwnValues(NamedTuple):
    """A rank's own values."""

    rank: int
    state: Any


class Found(NamedTuple):
    """A checkpoint that was found whole.

    tree: the state that was equal on all ranks, on every rank; tensors: those of it, on rank 0 at
           least.
    owned: the own values of that job's ranks, each on one rank of this job. Where the number of
           ranks is the same, a rank that sees its own part has it.
    missing: the ranks of that job whose own values are lost.
    """

    path: Path
    number: int
    step: int
    ranks: int
    tree: Json
    tensors: dict[str, torch.Tensor]
    owned: list[OwnValues]
    missing: list[int]


# Runs a rank's own writing: at once, or in a thread.
Run = Callable[[Callable[[], str]], "Future[str]"]


class PendingWrite(NamedTuple):
    """A rank's part being written; outcome: the error that kept this rank from writing, or ""."""

    path: Path
    number: int
    outcome: Future[str]


class Saving:
    """A checkpoint under way; `wait` returns its folder."""

    def __init__(self, archive: Archive, writing: PendingWrite) -> None:
        self._archive = archive
        self._problem: CheckpointError | None = None
        self.path, self.number, self.outcome = writing
        self.is_concluded = False  # whether the ranks know each other's outcomes

    def wait(self) -> Path:
        """Return its folder when it is whole; all ranks call it together.

        Raises CheckpointError, on every rank alike, when a rank could not write its part.
        """
        # Else `conclude` was called before, as the ranks left: nothing is to be gathered any more.
        if not self.is_concluded:
            (problems,) = gather_outcomes(world.current().engine, [self]).wait()
            self.conclude(problems)
        if self._problem is not None:
            raise self._problem
        return self.path

    def conclude(self, problems: Sequence[str]) -> CheckpointError | None:
        """Finish; return the error that `wait` raises, if any. problems: as of Archive.conclude."""
        self.is_concluded = True
        try:
            self._archive.conclude(self, problems)
        except CheckpointError as error:
            self._problem = error
        return self._problem


class Archive:
    """The checkpoints in a folder; every rank calls the same methods in the same order.

    number: of the last one that is known to be whole; 0: none.
    kept:   how many are kept; the older ones are removed once a new one is whole.
    under_way: the one that a thread writes, until a caller has waited for it.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        self.folder = folder  # made by `look`, where an error of one rank is raised on all
        self.number = 0
        self.kept = kept
        self.under_way: Saving | None = None
        self.scan()

    def scan(self) -> None:
        """List the parts that every rank sees; later checkpoints get higher numbers.

        No number is used twice: parts of two attempts under one number would look like a whole
        checkpoint.
        """
        self._parts = self._list()
        last = max((part.number for part in self._parts), default=0)
        if last >= LAST_NUMBER:
            raise CheckpointError(
                f"{self.folder} has a checkpoint {last}, after which there is no number: remove it"
            )
        self._next = 1 + last
        # One text for all ranks' parts, so that parts of two attempts under one number are told
        # apart.
        self._attempt: str = broadcast_object(secrets.token_hex(8), name="checkpoint.attempt")
        self._whole = sorted(whole.number for whole, absent in self._candidates() if not absent)
        # These are never removed: where nothing is whole, lost files may be restored, and files
        # that cannot be read now may be readable later.
        self._protected = set() if self._whole else self._numbers()

    def _list(self) -> dict[Part, list[int]]:
        mine = run_on_all(
            lambda: [tuple(part) for part in list_parts(made(self.folder))],
            f"{self.folder} cannot be made or listed",
        )
        holders: dict[Part, list[int]] = {}
        # Each host may have a folder of its own: which rank can read a part is known only by
        # asking.
        for holder, parts in enumerate(allgather_object(mine, "checkpoint.parts")):
            for part in parts:
                holders.setdefault(Part(*part), []).append(holder)
        return holders

    def _numbers(self) -> set[int]:
        return {part.number for part in self._parts}

    def _candidates(self) -> list[tuple[Part, list[Part]]]:
        """Return the common part, perhaps absent, and the absent parts of all, the newest first."""
        wholes = sorted({part._replace(name=ALL) for part in self._parts}, reverse=True)
        return [(whole, missing_parts(*whole[:3], self._parts)) for whole in wholes]

    def find(
        self, *takes: Callable[[Any], Any], missing_ranks: str = "error", way_out: str = ""
    ) -> Any | None:
        """Return what `takes` make of the newest whole checkpoint; None: none was ever finished.

        takes: the first gets a Found, each other one the result of the one before; without any, the
            Found itself is returned. All ranks call them together. One that raises DamagedError,
            perhaps not on every rank, rejects the checkpoint as a damaged one: no rank calls the
            next, and an older checkpoint is tried.
        missing_ranks: "report": where none is whole, find the one that lacks the fewest ranks' own
            parts, of several the newest.
        way_out: the end of the error's text where "report" would find one.
        Rank 0 logs the one that is returned. Raises CheckpointError, on every rank alike, where all
        finished ones are damaged, or lack files.
        """
        newest, problems = self._newest(takes)
        # Both lists are those of all ranks: all look again, or none does. A running job may have
        # finished newer ones, and removed these.
        while newest is None and self._list() != self._parts:
            self.scan()
            newest, problems = self._newest(takes)
        if newest is None:
            self._protected = self._numbers()
            if missing_ranks == "report":
                newest = self._most_of_one(takes)
        if newest is not None:
            found, taken = newest
            self.number = found.number
            if rank() == 0:
                print_line(
                    f"going on from checkpoint {found.number} (step {found.step}) in "
                    f"{self.folder}, made by {found.ranks} rank{'s' * (found.ranks > 1)}, on "
                    f"{size()}"
                )
            return taken
        if problems := problems + self._lost():
            ways = "Begin anew in another folder, or bring undamaged files back"
            if self._without_some() and missing_ranks != "report":
                ways += way_out
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(problems)}. {ways}"
            )
        return None

    def _most_of_one(self, takes: Sequence[Callable[[Any], Any]]) -> tuple[Found, Any] | None:
        """Read the checkpoint that lacks the fewest ranks' parts, where none is whole."""
        for whole in self._without_some():
            newest, problem = self._read_and(takes, whole, without_some=True)
            if newest is not None:
                return newest
            self._warn_of_incomplete(whole, problem)
        return None

    def _without_some(self) -> list[Part]:
        """Return the common parts that are there, those of the best checkpoints first."""
        # Counts the common part, too: every candidate has it, so the order stays the same.
        owned = Counter(part[:3] for part in self._parts)
        shared = sorted((part for part in self._parts if part.name == ALL), reverse=True)
        return sorted(shared, key=lambda whole: whole.ranks - owned[whole[:3]])

    def protect(self, number: int) -> None:
        """Never remove a checkpoint, and do not count it in `kept`; all ranks call it together.

        It is for one that could not be loaded: another version, host or script may load it.
        """
        self._whole = [each for each in self._whole if each != number]
        self._protected.add(number)

    def _newest(
        self, takes: Sequence[Callable[[Any], Any]]
    ) -> tuple[tuple[Found, Any] | None, list[str]]:
        """Return the newest that is whole; or the damages of those that have all parts."""
        damaged: list[str] = []
        for whole, absent in self._candidates():
            if absent:
                files = ", ".join(part.file for part in absent)
                self._warn_of_incomplete(whole, f"{files} not there")
                continue
            newest, problem = self._read_and(takes, whole)
            if newest is not None:
                return newest, []
            self._warn_of_incomplete(whole, problem)
            # Not counted in `kept`: else damaged ones would crowd out those that can be loaded.
            self._whole = [each for each in self._whole if each != whole.number]
            damaged.append(problem)
        return None, damaged

    def _lost(self) -> list[str]:
        """Return texts about checkpoints that have lost files, where nothing is whole.

        A part records whether a checkpoint was whole before it. That one is removed only once a
        newer one is whole, so files of one of them are gone. If none was whole before, writing was
        interrupted each time, and nothing is lost.
        """
        lacking = {whole[:3]: absent for whole, absent in self._candidates() if absent}
        before, problem = 0, ""
        try:
            for part, holders in self._parts.items():
                # One reader for each part: the others learn the number below.
                if part[:3] in lacking and holders[0] == rank():
                    before = max(before, read_json(self.folder, part)[0].before)
        except (OSError, DamagedError, FormatError) as error:
            problem = str(error)
        told = allgather_object((before, problem_text(problem)), "checkpoint.before")
        problems = by_rank([problem for _, problem in told])
        lost = [problems] if problems else []
        if any(before for before, _ in told):
            lost += [
                f"checkpoint {number} lacks {', '.join(part.file for part in absent)}"
                for (number, *_), absent in lacking.items()
            ]
        return lost

    def _warn_of_incomplete(self, whole: Part, why: str) -> None:
        if rank() == 0:
            what = f"checkpoint {whole.number} in {self.folder} is not whole"
            print_line(f"{what}: {why}; looking for an older one", logging.WARNING)

    def _read_and(
        self, takes: Sequence[Callable[[Any], Any]], whole: Part, without_some: bool = False
    ) -> tuple[tuple[Found, Any] | None, str]:
        """Return a checkpoint and the result of `takes`; or the text about its damage."""
        found, problem = self._read(whole, without_some)
        if found is None:
            return None, problem
        taken: Any = found
        for take in takes:
            try:
                taken, problem = take_on_all(take, taken, f"{found.path} cannot be loaded")
            except Exception:  # of the script; loading an older checkpoint would hide it
                self.protect(whole.number)
                raise
            if problem:  # the cause may be the script, or another version: keep the checkpoint
                self._protected.add(whole.number)
                return None, problem
        return (found, taken), ""

    def _read(self, whole: Part, without_some: bool) -> tuple[Found | None, str]:
        """Read a checkpoint, each part on one rank that sees it; or return a text of its damage.

        without_some: whether damaged parts of ranks' own are accepted.
        """
        number, step, ranks, _ = whole
        everything, *owns = parts_of(number, step, ranks)
        absent = [place for place, part in enumerate(owns) if part not in self._parts]
        source = _reader(0, self._parts[everything])
        mine = {everything: 0} if source == rank() else {}
        mine |= {
            part: place
            for place, part in enumerate(owns)
            if part in self._parts and _reader(place, self._parts[part]) == rank()
        }
        contents: dict[Part, Content] = {}
        owned: list[OwnValues] = []
        problem = refusal = text = ""
        unread = False
        for part, place in mine.items():
            try:
                content = read_part(self.folder, part)
                with naming(self.folder / part.file):
                    state = put_together(content.state.tree, content.state.tensors)
                    if part is everything:
                        text = json.dumps(content.state.tree)
                if part is not everything:
                    owned.append(OwnValues(place, state))
                contents[part] = content
            except FormatError as error:
                refusal = str(error)
            except (OSError, DamagedError, RecursionError) as error:
                if without_some and part is not everything:
                    absent.append(place)
                    continue
                problem, unread = str(error), isinstance(error, OSError)
            if refusal or problem:
                # Enough for this checkpoint: the other ranks are waiting for the outcome.
                break
        attempts = {content.attempt for content in contents.values()}
        # Reached by every rank, whatever it could read: one that raised before would leave the
        # others waiting here.
        told = allgather_object(
            (problem_text(problem), problem_text(refusal), unread, sorted(attempts), absent),
            "checkpoint.read",
        )
        if any(unread for _, _, unread, *_ in told):
            self._protected.add(number)
        if refusals := by_rank([refusal for _, refusal, *_ in told]):
            self.protect(number)
            raise CheckpointError(f"{refusals}; load it with the version of gtopk that saved it")
        if problems := by_rank([problem for problem, *_ in told]):
            return None, problems
        if len({attempt for *_, attempts, _ in told for attempt in attempts}) > 1:
            return None, f"the files of checkpoint {number} are of several attempts"
        # Sent as text: it may be nested deeper than the object codec allows.
        tree = json.loads(broadcast_object(text, source, "checkpoint.tree"))
        tensors = contents[everything].state.tensors if everything in contents else {}
        if source != 0:  # each host has a folder of its own, and rank 0 sits on another than then
            tensors = broadcast_tensors(tensors, source)
        path = self.folder / everything.folder
        missing = sorted({place for *_, absent in told for place in absent})
        return Found(path, number, step, ranks, tree, tensors, owned, missing), ""

    def write(self, snapshot: Snapshot, run: Run | None = None) -> Saving:
        """Begin to write a checkpoint; all ranks then wait for it.

        run: runs the part of it that needs no other rank; default: at once.
        """
        path = self.folder / parts_of(self._next, snapshot.step, size())[0].folder
        # Used up at once, even if the write fails: no number is used twice.
        number, self._next = self._next, self._next + 1
        parts = [(name_of(rank()), snapshot.own)]
        if rank() == 0:
            parts.append((ALL, snapshot.replicated))
        # Read now: `write_own` may run later, in another thread, when the ranks are another
        # world's.
        ranks, step, attempt, folder = size(), snapshot.step, self._attempt, self.folder
        rank_name = parts[0][0]
        before = max(self._whole, default=0)

        def write_own() -> str:
            try:
                # A user who frees disk space may have removed the folder while the job runs.
                if problem := _others_in(made(folder), number, step, ranks, rank_name):
                    return problem
                for name, state in parts:
                    part, content = Part(number, step, ranks, name), Content(attempt, state, before)
                    write_part(folder, part, content)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                return str(error) or type(error).__name__
            return ""

        return Saving(self, PendingWrite(path, number, (run or _at_once)(write_own)))

    def conclude(self, writing: Saving, problems: Sequence[str]) -> None:
        """End a checkpoint that is whole, or failed; remove the oldest, and incomplete ones.

        problems: by rank, why it could not write its part, or "".
        Raises CheckpointError, on every rank alike, when a rank could not write its part, or where
        another job writes to the folder; the other ranks' parts are then removed.
        """
        if any(_OTHERS in problem for problem in problems):
            # The files there may be the other job's, whose numbers must not be used.
            self._next = writing.number
            raise CheckpointError(
                f"checkpoint {writing.number} is not written to {self.folder}, and nothing there "
                f"is removed: {by_rank(problems)}"
            )
        if not any(problems):
            self.number = writing.number
            # Only now that a newer one is whole may the older ones go.
            self._whole = [*self._whole, writing.number][-self.kept :]
        stay = {*self._whole, *self._protected}
        # Where the disk fails, raise the same error as the other ranks; a later save removes.
        # Numbers from `_next` on are another job's: this one begins none before it ends the last.
        with contextlib.suppress(OSError):
            remove_checkpoints(
                self.folder, lambda number: number < self._next and number not in stay
            )
        if failures := by_rank(problems):
            last = f"checkpoint {self.number} is whole" if self.number else "there is no other"
            raise CheckpointError(
                f"checkpoint {writing.number} cannot be written to {self.folder}: {failures}; "
                f"{last}"
            )


def gather_outcomes(engine: Engine, writings: Sequence[Saving]) -> Operation:
    """Begin to gather the outcomes of these once they are known here; all ranks call it together.

    The result: for each, by rank, the error that kept the rank from writing, or "".
    """
    # Waits for this rank's writer here, in the script's thread: the engine's must not wait for a
    # disk.
    mine = [problem_text(writing.outcome.result()) for writing in writings]

    def work(transport: Transport, all_flags: list[int]) -> list[list[str]]:
        return [list(each) for each in zip(*transport.gather_object(mine), strict=True)]

    return engine.submit("checkpoint.written", [each.path.name for each in writings], work)


def _others_in(folder: Path, number: int, step: int, ranks: int, name: str) -> str:
    """Return a text about a checkpoint that another job has made since `scan`; "": there is none.

    Two jobs in one folder would each take the other's checkpoint for an incomplete one: a job
    removes, and numbers on from, only what was there at its `scan`.
    """
    for part in list_parts(folder):
        is_of_another = part[:3] != (number, step, ranks) or part.name == name
        if part.number >= number and is_of_another:
            return f"{_OTHERS}: {part.file} is not of this one. {_APART}"
    return ""


def _reader(place: int, holders: Sequence[int]) -> int:
    """Return the rank that reads a part: `place` modulo the number of ranks, else a holder."""
    wanted = place % size()
    return wanted if wanted in holders else holders[0]


def _at_once(task: Callable[[], str]) -> Future[str]:
    outcome: Future[str] = Future()
    outcome.set_result(task())
    return outcome
