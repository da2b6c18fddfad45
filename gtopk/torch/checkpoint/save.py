"""Saving and loading checkpoints: a training script calls these functions on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, SupportsIndex
from weakref import WeakKeyDictionary

import torch

from ...errors import CheckpointError, DamagedError, HorovodInternalError
from ...runtime.coordinator import Engine
from ...runtime.coordinator.operation import Operation
from ...runtime.logs import EVERYWHERE
from ...runtime.world import world
from ...runtime.world.membership import World
from .archive import Archive, Found, Saving, gather_outcomes
from .files import path_of, whole_number
from .state import Assembled, Parts, assemble, check, put_state, should_agree, snapshot, take_state
from .validation import run_on_all

_log = logging.getLogger("gtopk")


class Loaded(NamedTuple):
    """A loaded checkpoint: its folder, step, number of saving ranks, and plain data.

    missing: the saving ranks whose own parts, including their residuals, were lost.
    """

    path: Path
    step: int
    ranks: int
    values: dict[str, Any]
    missing: tuple[int, ...] = ()


class _Folders(dict[Path, Archive]):
    """The archives of the folders that a world has opened, by real path.

    Each archive keeps counting checkpoints. One under way is finished before the ranks leave.
    """

    def is_ready(self) -> bool:
        return all(saving.outcome.done() for saving in self._under_way())

    def begin(self, engine: Engine) -> Callable[[], None]:
        under_way = self._under_way()
        if not under_way:
            return lambda: None
        try:
            outcomes = gather_outcomes(engine, under_way)
        except HorovodInternalError as error:  # this rank has left without the others
            return partial(_end_alone, under_way, error)
        return partial(_end, under_way, outcomes)

    def _under_way(self) -> list[Saving]:
        savings = [archive.under_way for archive in self.values()]
        return [each for each in savings if each is not None and not each.is_concluded]


def _end(under_way: Sequence[Saving], gathered: Operation) -> None:
    """Conclude the checkpoints under way as this rank leaves; raise CheckpointError on failure."""
    try:
        outcomes = gathered.wait()
    except HorovodInternalError as error:  # a rank is lost
        _end_alone(under_way, error)
        return
    ended = [saving.conclude(each) for saving, each in zip(under_way, outcomes, strict=True)]
    _raise_all(str(failure) for failure in ended if failure)


def _end_alone(under_way: Sequence[Saving], why: HorovodInternalError) -> None:
    """Finish this rank's parts if the outcomes of the other ranks cannot be known."""
    for saving in under_way:
        _log.warning("cannot tell whether all ranks have written %s: %s", saving.path, why)
    outcomes = ((saving.path, saving.outcome.result()) for saving in under_way)
    _raise_all(f"{path} is not whole: {problem}" for path, problem in outcomes if problem)


def _raise_all(failures: Iterable[str]) -> None:
    if text := "; ".join(failures):
        raise CheckpointError(text)


_opened: WeakKeyDictionary[World, _Folders] = WeakKeyDictionary()


# Errors that load_state_dict()s raise for state with an unexpected shape.
_LOAD_ERRORS: Final = (
    DamagedError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_ADVICE: Final = (
    ", or continue without the residuals of the ranks whose own parts are missing: "
    'load_latest(..., missing_ranks="report")'
)

# One thread, to write files one after the other.
_writer = ThreadPoolExecutor(1, thread_name_prefix="gtopk-checkpoint")


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    loader: Any = None,
    step: SupportsIndex = 0,
    *,
    keep: SupportsIndex = 2,
    asynchronous: bool = False,
    **others: Any,
) -> Saving:
    """Save a training run in a folder; every rank must call it at the same point.

    Call it between two steps: after `optimizer.step()`, before the next backward pass. A loader
    with a drain() method is drained first.

    loader: any with state_dict(): the result of `gtopk.torch.adapt`, an ElasticSampler, ...; with
        None the next run restarts its epoch.
    step: the training step, which `load_latest` returns; an integer, the same on all ranks.
    keep: the number of checkpoints to keep in the folder; at least 1.
    asynchronous: return once the state is copied, and write while training goes on. A failure is
        logged immediately. It is raised by `wait()` of the returned object, by the next save once
        that is written, or by `shutdown`; a rank that leaves otherwise sets the exit code.
    others: more objects by name: with state_dict() (schedulers, a GradScaler), or plain data.

    Also saves the generators of torch, NumPy and Python. All hosts may share the folder, or each
    host may have its own. Writes no pickle, unless GTOPK_ALLOW_PICKLE=1 and the object codec does
    not support a type in the plain data.
    Raises CheckpointError, on every rank, if one cannot write; the previous checkpoint is then
    intact, and training may go on. Also raises it, after writing this checkpoint, if an earlier
    asynchronous save failed and `wait()` has not raised that error. Raises TypeError for a keep or
    step that is not an integer, ValueError for one out of range, or for a step that differs between
    ranks.
    """
    step, keep = whole_number("step", step, least=0), whole_number("keep", keep, least=1)
    if hasattr(loader, "drain"):
        loader.drain()  # first: other ranks may run the loader until they drain, too
    archive = _open(path_of(folder), keep)
    parts = Parts(model, optimizer, loader, others)

    def save() -> Saving:
        state, own = run_on_all(
            lambda: take_state(parts, copy=asynchronous),
            f"the state to save in {folder} at step {step} cannot be collected",
        )
        alike = should_agree(parts)
        saving = archive.write(
            snapshot(step, state, own, alike, asynchronous), _in_thread if asynchronous else None
        )
        if asynchronous:
            archive.under_way = saving
        else:
            saving.wait()
        return saving

    try:
        _wait_for_save(archive)
    except CheckpointError as earlier:  # raised only after this save, which may be the last one
        now = f"{save().path.name} is {'under way' if asynchronous else 'whole'} now"
        raise CheckpointError(f"{earlier}; {now}") from earlier
    return save()


def load_latest(
    folder: str | os.PathLike[str],
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Any = None,
    *,
    generators: bool = True,
    missing_ranks: Literal["error", "report"] = "error",
    **others: Any,
) -> Loaded | None:
    """Resume from the newest whole checkpoint; return None to begin afresh if there is none.

    Every rank must call it before its first step, with the objects that were saved. All ranks load
    the same checkpoint. If a rank's part is damaged, all ranks skip that checkpoint, and log the
    file and the reason.

    generators: whether to restore the random number generators.
    missing_ranks: "report": if no checkpoint is whole, for example because a host was lost with its
        own folder, resume from the one that lacks the fewest ranks' own parts, and from the newest
        of several. Those ranks' residuals are lost; a warning and the result's `missing` name them.

    On the same number of ranks the run resumes bit for bit, except for choices that depend on
    measurements (`Compression.auto`, values="auto", batch sizes). On another number every rank gets
    rank 0's state. The sum of the ranks' optimizer residuals is preserved, and the log says how
    much of it this rank gets. A rank's generators resume if a rank with its number saved.
    Raises CheckpointError, on every rank, if checkpoints were finished but all are damaged, lack
    files, or hold state that a load_state_dict rejects (its error is the cause). Raises ValueError
    if the checkpoint lacks a requested object.
    """
    if missing_ranks not in ("error", "report"):
        raise ValueError(f"missing_ranks must be 'error' or 'report', got {missing_ranks!r}")
    archive = _open(path_of(folder))
    parts = Parts(model, optimizer, loader, others)
    try:
        _wait_for_save(archive)
    except CheckpointError as error:
        _log.warning("%s; loading the newest whole checkpoint", error, extra=EVERYWHERE)
    # Scan an open folder again: other jobs or users may have changed it.
    archive.scan()
    # The cause for the final error; ranks exchange only its text.
    load_errors: list[Exception] = []

    def validate(assembled: Assembled) -> Assembled:
        try:
            return check(assembled, parts)
        except DamagedError as error:
            load_errors.append(error)
            name = assembled.found.path.name
            raise DamagedError(f"{name} cannot be loaded: {error}") from error

    def load(assembled: Assembled) -> tuple[Found, dict[str, Any]]:
        found = assembled.found
        try:
            return found, put_state(assembled, parts, generators)
        except _LOAD_ERRORS as error:
            load_errors.append(error)
            raise DamagedError(f"{found.path.name} cannot be loaded: {error!r:.300}") from error
        except (ValueError, RuntimeError) as error:
            # The constructor of a subclass may need other arguments.
            if type(error) in (ValueError, RuntimeError) and str(found.path) not in str(error):
                raise type(error)(f"{found.path}: {error}") from error
            raise

    try:
        loaded = archive.find(assemble, validate, load, missing_ranks=missing_ranks, advice=_ADVICE)
    except CheckpointError as error:
        if load_errors:
            raise error from load_errors[0]
        raise
    if loaded is None:
        return None
    found, values = loaded
    if found.missing:
        _log.warning(
            "%s lacks the own parts of ranks %s of %d: their residuals are lost, and the run "
            "continues without them",
            found.path,
            found.missing,
            found.ranks,
            extra=EVERYWHERE,
        )
    return Loaded(found.path, found.step, found.ranks, values, tuple(found.missing))


def _open(folder: Path, keep: int | None = None) -> Archive:
    here = world.current()
    if here not in _opened:
        _opened[here] = _Folders()
        # The world then waits for checkpoints under way before its ranks leave.
        here.unfinished.append(_opened[here])
    folders = _opened[here]
    folder = Path(os.path.realpath(folder))  # Path.resolve raises for a cycle of links
    if folder not in folders:
        # One Archive per folder: two would use the same number for two checkpoints.
        folders[folder] = Archive(folder, keep or 1)
    if keep is not None:
        folders[folder].kept = keep
    return folders[folder]


def _wait_for_save(archive: Archive) -> None:
    """Wait until nothing is under way; all ranks call it together.

    Raises CheckpointError, on every rank, if a rank could not write its part, unless `wait` has
    raised it.
    """
    # Cleared first, so that its error is raised once, not by every later save.
    saving, archive.under_way = archive.under_way, None
    if saving is not None and not saving.is_concluded:
        saving.wait()


def _in_thread(task: Callable[[], str]) -> Future[str]:
    def log_failure() -> str:
        if problem := task():
            _log.error("a checkpoint cannot be written: %s", problem)
        return problem

    return _writer.submit(log_failure)
