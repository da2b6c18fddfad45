"""Commits on disk: checkpoints in the folder that GTOPK_ELASTIC_DIR names (see `..checkpoint`).

A job that starts with the folder of one that ended goes on from the newest commit that is whole, on
as many ranks as it has.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ... import settings
from ...runtime.coordinator.agreement import name_ranks
from ...runtime.world import world
from ...runtime.world.membership import World
from ..checkpoint.archive import Archive, Snapshot
from ..checkpoint.tree import take_apart
from ..checkpoint.validation import run_on_all
from ..functions import allgather_object

FOLDER: Final = settings.ELASTIC_DIR.name
KEEP: Final = settings.ELASTIC_KEEP.name
ADVICE: Final = f"with {FOLDER}=folder its commits would be kept, for when it is started again"


class Commit(NamedTuple):
    """A commit: the values that are equal on every rank, and this rank's own, by name."""

    replicated: Mapping[str, Any]
    own: Mapping[str, Any]


def write(archive: Archive, commit: Commit) -> None:
    """Write a commit, and wait until it is whole; all ranks call it together.

    Raises CheckpointError, on every rank alike, when a rank cannot write its part.
    """
    # Ranks that ran out of batches, or step independently, have counted fewer.
    step = max(allgather_object(world.current().step, "elastic.step"))
    snapshot = run_on_all(
        lambda: Snapshot(step, take_apart({**commit.replicated}), take_apart({**commit.own})),
        f"a commit cannot be written to {archive.folder} ({FOLDER})",
    )
    archive.finish(archive.write(snapshot))


def advice_of(archive: Archive) -> str:
    """Return how the job can be continued when it ends early."""
    if not archive.number:
        return f"start it again; nothing is committed to {archive.folder} yet"
    return (
        f"start it again with {FOLDER}={archive.folder} on any number of ranks, and it goes on "
        f"from commit {archive.number}"
    )


# The archive that a state of this rank uses, by world.
_open: weakref.WeakKeyDictionary[World, weakref.ref[Archive]] = weakref.WeakKeyDictionary()


def open_archive(before: Archive | None = None) -> Archive | None:
    """Return the archive that the environment asks for; None: commits stay in memory.

    before: an earlier one of the same state, which is not used any more.
    Raises ValueError, on every rank alike, when the ranks are asked for different things, or
    another state on one of them uses the folder; CheckpointError, when one cannot list it.
    """
    folder = settings.ELASTIC_DIR.read()
    # As text, and checked only after the ranks have compared: a bad number must be an error on all.
    kept = settings.ELASTIC_KEEP.text() or settings.ELASTIC_KEEP.shown
    here = world.current()
    other = _open[here]() if here in _open else None
    # A path that stays right when the script changes its directory.
    path = Path(os.path.realpath(folder))
    is_second = other is not None and other is not before and other.folder == path
    told = allgather_object((bool(folder), kept, is_second), "elastic.asked")
    asked = [(has, keep) for has, keep, _ in told]
    if len(set(asked)) > 1:
        raise ValueError(
            f"{FOLDER} must be set on every rank or on none, and {KEEP} alike, got "
            f"{asked} by rank; mpirun hands variables to other hosts with -x"
        )
    if not folder:
        return None
    newest = settings.ELASTIC_KEEP.read()
    # On all ranks: on some the garbage collector may have removed the other state.
    if seconds := [number for number, (*_, second) in enumerate(told) if second]:
        raise ValueError(
            f"{FOLDER}={folder} keeps one state, and this is the second on {name_ranks(seconds)}; "
            "put what both hold into one TorchState, models and optimizers by keywords of your "
            "choice"
        )
    archive = Archive(path, newest)
    # Weak: a state that the script has dropped frees its folder.
    _open[here] = weakref.ref(archive)
    return archive
