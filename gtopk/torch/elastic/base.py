r"""State: the base of all elastic states, with commits, changes of hosts and plain objects.

`State` and `StateHandler` are Horovod's base classes. As in Horovod, their abstract methods raise
when called, not when an object is created.

`run` restarts a function from the last commit, as long as every rank is alive:

    sync -> function -> done
      ^        |
      |        |-- HorovodInternalError    restore \
      |        `-- HostsUpdatedInterrupt            > rejoin ----> on_reset -.
      `----------- (unless skip_sync) --------------------------------------'

A dead rank cannot be replaced within the job: the other ranks end, and with them the job. When it
is restarted (by torchrun --max-restarts, or by hand), it resumes from the newest whole commit in
the folder GTOPK_ELASTIC_DIR, on any number of ranks. The commits there are checkpoints (see
`..checkpoint`).
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import IntFlag
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import torch

from ... import settings
from ...errors import HorovodInternalError, HostsUpdatedInterrupt
from ...runtime.coordinator.agreement import name_ranks
from ...runtime.world import world
from ...runtime.world.membership import World
from ..checkpoint.archive import Archive, Found, Snapshot
from ..checkpoint.tree import flatten, unflatten
from ..checkpoint.validation import run_on_all
from ..functions import allgather_object, broadcast_object
from ..mpi_ops import Max, allreduce, rank, size

FOLDER: Final = settings.ELASTIC_DIR.name
KEEP: Final = settings.ELASTIC_KEEP.name
ADVICE: Final = f"set {FOLDER}=folder to keep its commits for a restart"
FOR_DISK_COMMITS: Final = " for GTOPK_ELASTIC_DIR, where commits are written to disk"


def missing_override(owner: object, method: str, why: str = "") -> NotImplementedError:
    """Return the error for a method that a class does not implement."""
    return NotImplementedError(f"{type(owner).__name__} must define {method}(){why}")


class Commit(NamedTuple):
    """A commit: by name, the values that are equal on every rank, and this rank's own."""

    replicated: Mapping[str, Any]
    own: Mapping[str, Any]


def write_commit(archive: Archive, commit: Commit) -> None:
    """Write a commit, and wait until it is whole; all ranks call it together.

    Raises CheckpointError, on every rank, if a rank cannot write its part.
    """
    # The maximum: ranks that ran out of batches, or step independently, have counted fewer.
    step = max(allgather_object(world.current().step, "elastic.step"))
    snapshot = run_on_all(
        lambda: Snapshot(step, flatten({**commit.replicated}), flatten({**commit.own})),
        f"a commit cannot be written to {archive.folder} ({FOLDER})",
    )
    archive.write(snapshot).wait()


def advice_of(archive: Archive) -> str:
    """Return advice on how to continue the job if it ends early."""
    if not archive.number:
        return f"restart it; nothing is committed to {archive.folder} yet"
    return (
        f"restart it with {FOLDER}={archive.folder} on any number of ranks, to resume from commit "
        f"{archive.number}"
    )


# By world, the archive that a state of this rank uses.
_open: weakref.WeakKeyDictionary[World, weakref.ref[Archive]] = weakref.WeakKeyDictionary()


def open_archive(before: Archive | None = None) -> Archive | None:
    """Return the archive that the environment asks for; None if commits stay in memory.

    before: an earlier archive of the same state, which is no longer used.
    Raises ValueError, on every rank, if the ranks' settings differ, or if another state on a rank
    uses the folder; CheckpointError if a rank cannot list it.
    """
    folder = settings.ELASTIC_DIR.read()
    # Kept as text until the ranks have compared it: a bad number must be an error on all ranks.
    kept = settings.ELASTIC_KEEP.text() or settings.ELASTIC_KEEP.shown
    here = world.current()
    other = _open[here]() if here in _open else None
    # An absolute path, which stays valid if the script changes its directory.
    path = Path(os.path.realpath(folder))
    is_second = other is not None and other is not before and other.folder == path
    answers = allgather_object((bool(folder), kept, is_second), "elastic.asked")
    settings_by_rank = [(has, keep) for has, keep, _ in answers]
    if len(set(settings_by_rank)) > 1:
        raise ValueError(
            f"{FOLDER} must be set on every rank or on none, and {KEEP} alike, got "
            f"{settings_by_rank} by rank; mpirun passes variables to other hosts with -x"
        )
    if not folder:
        return None
    newest = settings.ELASTIC_KEEP.read()
    # Fail on all ranks: on some the garbage collector may have removed the other state.
    if second_ranks := [number for number, (*_, second) in enumerate(answers) if second]:
        raise ValueError(
            f"{FOLDER}={folder} keeps one state, and this is the second on "
            f"{name_ranks(second_ranks)}; put both into one TorchState, with further models and "
            "optimizers as keywords"
        )
    archive = Archive(path, newest)
    # A weak reference: a state that the script has dropped frees its folder.
    _open[here] = weakref.ref(archive)
    return archive


class HostUpdateResult(IntFlag):
    """A change of the hosts, with the numbers of Horovod's launcher."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """The state that a training process must not lose; subclass it to define how to save it.

    bcast_object: broadcasts an object from rank 0.
    get_rank: returns this process's rank.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        # SimpleQueue.put is reentrant: a signal handler may call `on_hosts_updated`.
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0  # lets `run` see whether training advances
        self._saved_step: int | None = None  # the world's step at the last save; None if unknown
        self._was_restored = False  # restored to that step, and not synchronized since

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to call when the ranks have rejoined; their number may have changed.

        For example, a callback may rescale the learning rate. Callbacks run on every rank, before
        the state is synchronized.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset what depends on the ranks, and call the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = HostUpdateResult.mixed) -> None:
        """Note a change of the hosts, past or imminent; call it in any thread or signal handler.

        timestamp: must be greater than that of the last handled change.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state; raise HostsUpdatedInterrupt if a rank knows of changed hosts.

        Every rank must call it at the same point. A failure loses the progress since the last
        commit.
        """
        self.save()
        self._saved_step = world.current().step
        self._persist()
        # Counted before the interrupt is raised: this commit is whole.
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on every rank, if a rank knows of changed hosts.

        Every rank must call it at the same point.
        """
        timestamp, update = self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            reported, what = self._host_messages.get()
            if reported > self._last_updated_timestamp:
                timestamp, update = max(reported, timestamp), update | what
        # One allreduce of the maximum combines the flags of all ranks and the newest timestamp.
        own = torch.tensor(
            [timestamp, bool(update & HostUpdateResult.removed), update & HostUpdateResult.added],
            dtype=torch.float64,
            device="cpu",
        )
        latest, removed, added = allreduce(own, op=Max, name="elastic.host_updates").tolist()
        if latest > self._last_updated_timestamp:
            self._last_updated_timestamp = latest
            # Without new ranks all have the same state already, so sync can be skipped.
            raise HostsUpdatedInterrupt(skip_sync=bool(removed and not added))

    def _resume_saved_step(self) -> None:
        """Set a new world's step to the restored one: the steps after it will be repeated."""
        if self._saved_step is not None:
            world.current().resume(self._saved_step)
            self._was_restored = True

    def _persist(self) -> None:
        """Write the saved state to disk; only some subclasses do."""

    def save(self) -> None:
        """Copy the state, for `restore`."""
        raise missing_override(self, "save")

    def restore(self) -> None:
        """Return to the last saved state."""
        raise missing_override(self, "restore")

    def sync(self) -> None:
        """Give every rank the state of rank 0."""
        raise missing_override(self, "sync")

    def reset(self) -> None:
        """Reset what depends on the ranks, after they have rejoined."""


class ObjectState(State):
    """A state of plain objects: each keyword becomes an attribute.

    Objects are encoded with the object codec: without pickle, unless it is allowed.

    With GTOPK_ELASTIC_DIR=folder, `commit` also writes to that folder, and the first `sync` resumes
    from the newest commit there. Use a folder for one state only, and keep the keywords the same.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._archive: Archive | None = None
        # Whether the state has loaded an earlier job's newest commit, or has since made its own.
        self._is_resumed = False
        for name, value in kwargs.items():
            setattr(self, name, value)
        # Its keys are the names of the attributes that `save` reads.
        self._saved_state = kwargs
        # Not self.save(): a subclass's `save` may need what its constructor sets later.
        ObjectState.save(self)

    def save(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})
        self._saved_step = world.current().step if world.is_initialized() else None

    def restore(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give every rank the state of rank 0; the first time, resume an earlier job's commit.

        Raises CheckpointError, on every rank, if that job's newest commit cannot be loaded.
        """
        found = None
        # Ask all ranks: a failure in the first `sync` may have hit after some had finished it. If
        # they did not load again, their initial state would be committed over the earlier job's.
        if not all(allgather_object(self._is_resumed, "elastic.resumed")):
            self._is_resumed = False
            self._archive = open_archive(self._archive)
            found = self._archive and self._archive.find()
        elif self._archive:
            # Not in `on_reset`: after a failure in the first `sync` some ranks may lack an archive.
            self._archive.scan()
        if found:
            self._check_names(found)
            run_on_all(partial(self._load, found), f"{found.path} cannot be loaded")
            # The commit's samplers and learning rates fit that job's number of ranks.
            if found.ranks != size():
                self.on_reset()
        self._share()
        if found:
            world.current().resume(found.step)
            self._resume_here(found)
            self.save()
        self._is_resumed = True
        self._advise()

    def _load(self, found: Found) -> None:
        """Load on rank 0 the values that `_share` then sends."""
        if self._rank() == 0:
            self._resume(unflatten(found.tree, found.tensors))

    def _persist(self) -> None:
        if not self._is_resumed:
            self._archive = open_archive(self._archive)
            self._is_resumed = True
        if self._archive:
            write_commit(self._archive, self._committed())
            self._advise()

    def _advise(self) -> None:
        """Set the advice on how to continue the job, which errors end with."""
        world.current().advice = advice_of(self._archive) if self._archive else ADVICE

    def _check_names(self, found: Found) -> None:
        """Raise ValueError, on every rank, if the commit is from another state."""
        names, found_names = sorted(self._committed().replicated), sorted(found.tree)
        if names != found_names:
            raise ValueError(
                f"commit {found.number} holds {found_names}, and this state {names}; use the same "
                f"names, or another folder in {FOLDER}"
            )

    def _committed(self) -> Commit:
        """Return the last saved state, to write to disk."""
        return Commit(self._saved_state, {})

    def _share(self) -> None:
        """Give every rank the state of rank 0."""
        ObjectState.save(self)
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)
        # A rank may be one commit ahead if the failure hit during a commit.
        step = broadcast_object(self._saved_step, name="elastic.step")
        if self._was_restored and step != self._saved_step:
            self._saved_step = step
            world.current().resume(step)
        self._was_restored = False

    def _resume(self, replicated: Mapping[str, Any]) -> None:
        """Load on rank 0 the values that were equal on all ranks of an earlier job."""
        self._saved_state = {name: replicated[name] for name in self._saved_state}
        ObjectState.restore(self)

    def _resume_here(self, found: Found) -> None:
        """Load on every rank the own values of an earlier job's ranks."""


S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

# After this many attempts from one commit, raise the error: it is not transient.
_ATTEMPTS: Final = 10


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function to survive failures; its first argument must be a State.

    Any launcher of gtopk's ranks will do; no elastic launcher is needed. If an operation fails
    while all ranks are alive (they disagreed, or one raised HorovodInternalError), every rank
    returns to its last commit and calls the function again. If a rank has died or does not respond,
    the others raise HorovodInternalError, which names the rank and says how to continue the job.
    """
    return run_fn(func, world.rejoin)


def run_fn(
    func: Callable[Concatenate[S, P], T], reset: Callable[[], object]
) -> Callable[Concatenate[S, P], T]:
    """Decorate as `run` does, but with `reset` in place of `rejoin` to make the ranks rejoin."""

    @functools.wraps(func)
    def recovering(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        skip_sync = False
        attempts, commits = 1, state._commits
        while True:
            restored = False
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                # A commit since the last failure is progress, and restarts the count.
                attempts = 1 if state._commits > commits else attempts + 1
                commits = state._commits
                if attempts > _ATTEMPTS:
                    raise
                state.restore()
                restored, skip_sync = True, False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            # Outside the handlers: if the reset fails, the error must end the function.
            reset()
            # After the reset, which sets the new world's step to that of the failure.
            if restored:
                state._resume_saved_step()
            state.on_reset()

    return recovering
