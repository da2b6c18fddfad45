"""Archive: the checkpoints in a folder, which all ranks write and find together.

All hosts may share one folder, or each host may have its own.

    write    every rank writes its part, rank 0 also the state that is equal on all ranks
             -> exchange who failed
    find     all ranks list the parts that they see -> read the newest whole checkpoint
             -> exchange which parts are damaged
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
    ensure_folder,
    list_parts,
    missing_parts,
    name_of,
    naming,
    parts_of,
    read_json,
    read_part,
    remove_checkpoints,
    write_part,
)
from .tree import Flattened, Json, unflatten
from .validation import broadcast_tensors, by_rank, problem_text, run_on_all, take_on_all

_OTHER_JOB: Final = "another job writes to this folder, too"
_SEPARATE_FOLDERS: Final = (
    "Give each job a folder of its own, or stop the other one and restart this one; dcp.save needs "
    "its own folder, too"
)


class Snapshot(NamedTuple):
    """The values that a rank writes: its own and, on rank 0, those that are equal on all ranks."""

    step: int
    replicated: Flattened
    own: Flattened


class OwnValues(NamedTuple):
    """A rank's own values."""

    rank: int
    state: Any


class Found(NamedTuple):
    """A checkpoint that was found and read.

    tree: the state that was equal on all ranks; every rank gets it.
    tensors: the tensors of `tree`, at least on rank 0.
    owned: the saving ranks' own values, each on one rank of this job. If the number of ranks is the
           same, a rank that sees its own part reads that.
    missing: the saving ranks whose own values are lost.
    """

    path: Path
    number: int
    step: int
    ranks: int
    tree: Json
    tensors: dict[str, torch.Tensor]
    owned: list[OwnValues]
    missing: list[int]


# Runs the function that writes a rank's files: immediately, or in a thread.
Run = Callable[[Callable[[], str]], "Future[str]"]


class PendingWrite(NamedTuple):
    """A rank's part being written; outcome: the error if this rank could not write it, or ""."""

    path: Path
    number: int
    outcome: Future[str]


class Saving:
    """A checkpoint being written; call `wait` to finish it and get its folder."""

    def __init__(self, archive: Archive, writing: PendingWrite) -> None:
        self._archive = archive
        self._problem: CheckpointError | None = None
        self.path, self.number, self.outcome = writing
        self.is_concluded = False  # whether the ranks know each other's outcomes

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, and return its folder; all ranks call it together.

        Raises CheckpointError, on every rank, if a rank could not write its part.
        """
        # If the ranks have left, `conclude` was already called, and nothing can be gathered.
        if not self.is_concluded:
            (problems,) = gather_outcomes(world.current().engine, [self]).wait()
            self.conclude(problems)
        if self._problem is not None:
            raise self._problem
        return self.path

    def conclude(self, problems: Sequence[str]) -> CheckpointError | None:
        """Finish; return the error for `wait` to raise, if any. problems: see Archive.conclude."""
        self.is_concluded = True
        try:
            self._archive.conclude(self, problems)
        except CheckpointError as error:
            self._problem = error
        return self._problem


class Archive:
    """The checkpoints in a folder; all ranks must call the same methods in the same order.

    number: of the newest checkpoint known to be whole; 0 if there is none.
    kept:   how many checkpoints to keep; older ones are removed once a new one is whole.
    under_way: the checkpoint that a thread is writing, until a caller has waited for it.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        self.folder = folder  # created in `_list`, where one rank's error is raised on all
        self.number = 0
        self.kept = kept
        self.under_way: Saving | None = None
        self.scan()

    def scan(self) -> None:
        """List the parts that every rank sees; new checkpoints get higher numbers.

        A number is never reused: parts of two attempts under one number could look like a whole
        checkpoint.
        """
        self._parts = self._list()
        last = max((part.number for part in self._parts), default=0)
        if last >= LAST_NUMBER:
            raise CheckpointError(
                f"{self.folder} has a checkpoint {last}, the largest possible number: remove it"
            )
        self._next = 1 + last
        # All ranks' parts get the same text, which distinguishes attempts that use the same
        # number.
        self._attempt: str = broadcast_object(secrets.token_hex(8), name="checkpoint.attempt")
        self._whole = sorted(whole.number for whole, absent in self._candidates() if not absent)
        # Never removed: if nothing is whole, lost files may be restored, and unreadable files may
        # be readable later.
        self._protected = set() if self._whole else self._numbers()

    def _list(self) -> dict[Part, list[int]]:
        own_parts = run_on_all(
            lambda: [tuple(part) for part in list_parts(ensure_folder(self.folder))],
            f"{self.folder} cannot be created or listed",
        )
        holders: dict[Part, list[int]] = {}
        # Each host may have its own folder, so ask every rank which parts it can read.
        for holder, parts in enumerate(allgather_object(own_parts, "checkpoint.parts")):
            for part in parts:
                holders.setdefault(Part(*part), []).append(holder)
        return holders

    def _numbers(self) -> set[int]:
        return {part.number for part in self._parts}

    def _candidates(self) -> list[tuple[Part, list[Part]]]:
        """Return each checkpoint's common part and its absent parts, newest checkpoint first."""
        wholes = sorted({part._replace(name=ALL) for part in self._parts}, reverse=True)
        return [(whole, missing_parts(*whole[:3], self._parts)) for whole in wholes]

    def find(
        self, *stages: Callable[[Any], Any], missing_ranks: str = "error", advice: str = ""
    ) -> Any | None:
        """Load the newest whole checkpoint through `stages`; return None if none was ever finished.

        stages: functions that all ranks call together. The first gets a Found, each other one the
            result of the one before; the last result (or the Found) is returned. If one raises
            DamagedError on any rank, the checkpoint is rejected as damaged: no rank calls the next
            function, and an older checkpoint is tried.
        missing_ranks: "report": if none is whole, take the one that lacks the fewest ranks' own
            parts, and the newest of several.
        advice: ends the error's text if "report" would find a checkpoint.
        Rank 0 logs which checkpoint is used. Raises CheckpointError, on every rank, if all finished
        checkpoints are damaged or lack files.
        """
        newest, problems = self._newest(stages)
        # A running job may have finished newer checkpoints and removed these. Both lists are equal
        # on all ranks, so that all scan again, or none does.
        while newest is None and self._list() != self._parts:
            self.scan()
            newest, problems = self._newest(stages)
        if newest is None:
            self._protected = self._numbers()
            if missing_ranks == "report":
                newest = self._most_complete(stages)
        if newest is not None:
            found, result = newest
            self.number = found.number
            if rank() == 0:
                print_line(
                    f"resuming from checkpoint {found.number} (step {found.step}) in "
                    f"{self.folder}, saved on {found.ranks} rank{'s' * (found.ranks > 1)}, on "
                    f"{size()}"
                )
            return result
        if problems := problems + self._lost_files():
            remedies = "Start over in another folder, or restore undamaged files"
            if self._most_complete_first() and missing_ranks != "report":
                remedies += advice
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(problems)}. {remedies}"
            )
        return None

    def _most_complete(self, stages: Sequence[Callable[[Any], Any]]) -> tuple[Found, Any] | None:
        """Read the checkpoint that lacks the fewest ranks' parts, for when none is whole."""
        for whole in self._most_complete_first():
            newest, problem = self._read_and_load(stages, whole, allow_missing=True)
            if newest is not None:
                return newest
            self._warn_of_incomplete(whole, problem)
        return None

    def _most_complete_first(self) -> list[Part]:
        """Return the existing common parts, most complete checkpoint first."""
        # The count includes the common part, which every candidate has: the order is the same.
        owned = Counter(part[:3] for part in self._parts)
        shared = sorted((part for part in self._parts if part.name == ALL), reverse=True)
        return sorted(shared, key=lambda whole: whole.ranks - owned[whole[:3]])

    def protect(self, number: int) -> None:
        """Never remove a checkpoint, and do not count it in `kept`; all ranks call it together.

        Use it for a checkpoint that failed to load: another version, host or script may load it.
        """
        self._whole = [each for each in self._whole if each != number]
        self._protected.add(number)

    def _newest(
        self, stages: Sequence[Callable[[Any], Any]]
    ) -> tuple[tuple[Found, Any] | None, list[str]]:
        """Return the newest whole checkpoint, or why those with all parts could not be loaded."""
        damaged: list[str] = []
        for whole, absent in self._candidates():
            if absent:
                files = ", ".join(part.file for part in absent)
                self._warn_of_incomplete(whole, f"{files} missing")
                continue
            newest, problem = self._read_and_load(stages, whole)
            if newest is not None:
                return newest, []
            self._warn_of_incomplete(whole, problem)
            # Not counted in `kept`: damaged checkpoints must not crowd out loadable ones.
            self._whole = [each for each in self._whole if each != whole.number]
            damaged.append(problem)
        return None, damaged

    def _lost_files(self) -> list[str]:
        """Return texts about checkpoints that have lost files, for when nothing is whole.

        A part records the newest checkpoint that was whole before it. That one is removed only once
        a newer one is whole, so one of the two has lost files. If no part records any, each save
        was interrupted, and nothing is lost.
        """
        lacking = {whole[:3]: absent for whole, absent in self._candidates() if absent}
        before, problem = 0, ""
        try:
            for part, holders in self._parts.items():
                # One rank reads each part; the others receive the number below.
                if part[:3] in lacking and holders[0] == rank():
                    before = max(before, read_json(self.folder, part)[0].before)
        except (OSError, DamagedError, FormatError) as error:
            problem = str(error)
        reports = allgather_object((before, problem_text(problem)), "checkpoint.before")
        problems = by_rank([problem for _, problem in reports])
        lost = [problems] if problems else []
        if any(before for before, _ in reports):
            lost += [
                f"checkpoint {number} lacks {', '.join(part.file for part in absent)}"
                for (number, *_), absent in lacking.items()
            ]
        return lost

    def _warn_of_incomplete(self, whole: Part, why: str) -> None:
        if rank() == 0:
            what = f"checkpoint {whole.number} in {self.folder} is not whole"
            print_line(f"{what}: {why}; looking for an older one", logging.WARNING)

    def _read_and_load(
        self, stages: Sequence[Callable[[Any], Any]], whole: Part, allow_missing: bool = False
    ) -> tuple[tuple[Found, Any] | None, str]:
        """Return a checkpoint and the result of `stages`, or a text about its damage."""
        found, problem = self._read(whole, allow_missing)
        if found is None:
            return None, problem
        result: Any = found
        for stage in stages:
            try:
                result, problem = take_on_all(stage, result, f"{found.path} cannot be loaded")
            except Exception:  # the script's; loading an older checkpoint would hide it
                self.protect(whole.number)
                raise
            if problem:  # perhaps due to the script, or to another version: keep the checkpoint
                self._protected.add(whole.number)
                return None, problem
        return (found, result), ""

    def _read(self, whole: Part, allow_missing: bool) -> tuple[Found | None, str]:
        """Read a checkpoint, each part on one rank that sees it, or return a text about its damage.

        allow_missing: whether to accept that ranks' own parts are damaged.
        """
        number, step, ranks, _ = whole
        common, *own_parts = parts_of(number, step, ranks)
        absent = [place for place, part in enumerate(own_parts) if part not in self._parts]
        source = _reading_rank(0, self._parts[common])
        own_reads = {common: 0} if source == rank() else {}
        own_reads |= {
            part: place
            for place, part in enumerate(own_parts)
            if part in self._parts and _reading_rank(place, self._parts[part]) == rank()
        }
        contents: dict[Part, Content] = {}
        owned: list[OwnValues] = []
        problem = refusal = text = ""
        is_unreadable = False
        for part, place in own_reads.items():
            try:
                content = read_part(self.folder, part)
                with naming(self.folder / part.file):
                    state = unflatten(content.state.tree, content.state.tensors)
                    if part is common:
                        text = json.dumps(content.state.tree)
                if part is not common:
                    owned.append(OwnValues(place, state))
                contents[part] = content
            except FormatError as error:
                refusal = str(error)
            except (OSError, DamagedError, RecursionError) as error:
                if allow_missing and part is not common:
                    absent.append(place)
                    continue
                problem, is_unreadable = str(error), isinstance(error, OSError)
            if refusal or problem:
                # One error rejects the checkpoint, and the other ranks wait for the outcome.
                break
        attempts = {content.attempt for content in contents.values()}
        # Every rank must get here, whatever it could read: raising earlier would leave the others
        # waiting.
        reports = allgather_object(
            (problem_text(problem), problem_text(refusal), is_unreadable, sorted(attempts), absent),
            "checkpoint.read",
        )
        if any(is_unreadable for _, _, is_unreadable, *_ in reports):
            self._protected.add(number)
        if refusals := by_rank([refusal for _, refusal, *_ in reports]):
            self.protect(number)
            raise CheckpointError(f"{refusals}; load it with the version of gtopk that saved it")
        if problems := by_rank([problem for problem, *_ in reports]):
            return None, problems
        if len({attempt for *_, attempts, _ in reports for attempt in attempts}) > 1:
            return None, f"the files of checkpoint {number} are of several attempts"
        # Sent as text, because it may be nested deeper than the object codec allows.
        tree = json.loads(broadcast_object(text, source, "checkpoint.tree"))
        tensors = contents[common].state.tensors if common in contents else {}
        if source != 0:  # each host has its own folder, and rank 0 is now on another host
            tensors = broadcast_tensors(tensors, source)
        path = self.folder / common.folder
        missing = sorted({place for *_, absent in reports for place in absent})
        return Found(path, number, step, ranks, tree, tensors, owned, missing), ""

    def write(self, snapshot: Snapshot, run: Run | None = None) -> Saving:
        """Begin to write a checkpoint; all ranks call it together, and later `wait` on the result.

        run: runs the part that needs no other rank, such as in a thread; default: immediately.
        """
        path = self.folder / parts_of(self._next, snapshot.step, size())[0].folder
        # Used up even if the write fails: a number is never reused.
        number, self._next = self._next, self._next + 1
        parts = [(name_of(rank()), snapshot.own)]
        if rank() == 0:
            parts.append((ALL, snapshot.replicated))
        # Read now: `write_own` may run in another thread when the ranks already form another
        # world.
        ranks, step, attempt, folder = size(), snapshot.step, self._attempt, self.folder
        rank_name = parts[0][0]
        before = max(self._whole, default=0)

        def write_own() -> str:
            try:
                # A user may have removed the folder to free disk space while the job runs.
                if problem := _other_job(ensure_folder(folder), number, step, ranks, rank_name):
                    return problem
                for name, state in parts:
                    part, content = Part(number, step, ranks, name), Content(attempt, state, before)
                    write_part(folder, part, content)
            except Exception as error:  # of any kind: the other ranks must get the error
                return str(error) or type(error).__name__
            return ""

        return Saving(self, PendingWrite(path, number, (run or _run_now)(write_own)))

    def conclude(self, saving: Saving, problems: Sequence[str]) -> None:
        """Finish a checkpoint that is whole or has failed; remove old and incomplete ones.

        problems: for each rank, why it could not write its part, or "".
        Raises CheckpointError, on every rank, if a rank could not write its part (the other parts
        are then removed), or if another job writes to the folder.
        """
        if any(_OTHER_JOB in problem for problem in problems):
            # The files with this number may be the other job's: remove none of them.
            self._next = saving.number
            raise CheckpointError(
                f"checkpoint {saving.number} is not written to {self.folder}, and nothing there "
                f"is removed: {by_rank(problems)}"
            )
        if not any(problems):
            self.number = saving.number
            # Remove older checkpoints only now that a newer one is whole.
            self._whole = [*self._whole, saving.number][-self.kept :]
        kept_numbers = {*self._whole, *self._protected}
        # Ignore disk errors, to raise the same error as the other ranks; a later save removes.
        # Numbers from `_next` on are another job's: this one writes one checkpoint at a time.
        with contextlib.suppress(OSError):
            remove_checkpoints(
                self.folder, lambda number: number < self._next and number not in kept_numbers
            )
        if failures := by_rank(problems):
            last = f"checkpoint {self.number} is whole" if self.number else "there is no other"
            raise CheckpointError(
                f"checkpoint {saving.number} cannot be written to {self.folder}: {failures}; {last}"
            )


def gather_outcomes(engine: Engine, writings: Sequence[Saving]) -> Operation:
    """Wait for this rank's outcomes, and begin to gather those of all; all ranks call it together.

    The operation's result: for each checkpoint, each rank's error, or "" if it wrote its part.
    """
    # Wait for the writer here, in the script's thread: the engine's thread must not wait for a
    # disk.
    own_problems = [problem_text(writing.outcome.result()) for writing in writings]

    def work(transport: Transport, all_flags: list[int]) -> list[list[str]]:
        return [list(each) for each in zip(*transport.gather_object(own_problems), strict=True)]

    return engine.submit("checkpoint.written", [each.path.name for each in writings], work)


def _other_job(folder: Path, number: int, step: int, ranks: int, name: str) -> str:
    """Return a text if another job has written a checkpoint since `scan`; "" if not.

    Two jobs in one folder would take each other's checkpoints for incomplete ones. So a job counts
    on from, and removes, only the checkpoints that its `scan` found.
    """
    for part in list_parts(folder):
        is_foreign = part[:3] != (number, step, ranks) or part.name == name
        if part.number >= number and is_foreign:
            return f"{_OTHER_JOB}: {part.file} is not of this job. {_SEPARATE_FOLDERS}"
    return ""


def _reading_rank(place: int, holders: Sequence[int]) -> int:
    """Return the rank that reads a part: `place` modulo the number of ranks, or else a holder."""
    preferred = place % size()
    return preferred if preferred in holders else holders[0]


def _run_now(task: Callable[[], str]) -> Future[str]:
    outcome: Future[str] = Future()
    outcome.set_result(task())
    return outcome
