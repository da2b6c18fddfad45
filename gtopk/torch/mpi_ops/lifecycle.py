"""Lifecycle: joining the world with its process sets, and leaving it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...recording import start  # noqa: F401 -- observes every world that is made from now on
from ...world import process_sets as sets
from ...world import world
from ...world.process_sets import ProcessSet
from .handles import forget_all

if TYPE_CHECKING:
    from mpi4py import MPI


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the world that a launcher started, or be a world of one; see `world.init`.

    comm: the ranks, of those that were launched, that are the world, or an mpi4py communicator.
        Only they call this; over MPI the others must `import mpi4py.MPI`, which starts it.
    process_sets: those to register at once; "dynamic" allows to add and remove some later.
    """
    wanted = sets.wanted(process_sets)
    if world.is_initialized():
        return
    forget_all()
    world.init(comm)
    for process_set in wanted:
        sets.register(process_set)
