"""mpi4py's communicators: as ranks of the world, and of ranks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collectives.transports import Transport

if TYPE_CHECKING:
    from mpi4py import MPI


def is_communicator(comm: object) -> bool:
    """Tell whether this is an mpi4py communicator."""
    return hasattr(comm, "Split_type")


def communicator_of(ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of these ranks of MPI.COMM_WORLD; only they call this."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(ranks))


def ranks_of(comm: MPI.Intracomm, transport: Transport) -> list[int]:
    """Return a communicator's ranks, as ranks of a transport; all of the transport call this.

    Each may come with a communicator of its own: what MPI's Split makes on half of the ranks
    differs from what it makes on the other half.
    """
    from mpi4py import MPI

    of_mpi = transport.gather_object(MPI.COMM_WORLD.rank)
    places = {number: rank for rank, number in enumerate(of_mpi)}
    numbers = range(comm.size)
    translated = MPI.Group.Translate_ranks(comm.group, list(numbers), MPI.COMM_WORLD.group)
    return sorted(places[rank] for rank in translated)
