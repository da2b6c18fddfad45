"""The counter of MPI's ranks: eight bytes of one rank's memory, added to by one-sided calls.

Rget_accumulate is a fetch-and-add that can be tested: a wait for it ends when the keeper is gone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .patience import wait_until
from .transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

KEEPER: Final = 0  # of the communicator, and of the stream


class WindowCounter:
    """A number in the memory of a communicator's rank 0."""

    def __init__(
        self,
        mpi: Any,
        communicator: MPI.Intracomm,
        stream: Transport,
        calling: AbstractContextManager[Any],
    ) -> None:
        """Make it; all ranks of the communicator do so together, and MPI waits for all of them.

        calling: is entered around every call, where threads must take turns.
        """
        self._mpi = mpi
        self._stream = stream
        self._calling = calling
        number = np.dtype(np.int64)
        keeps = stream.rank == KEEPER
        with calling:
            self._window = mpi.Win.Allocate(
                number.itemsize if keeps else 0, number.itemsize, comm=communicator
            )
            if keeps:
                self._window.Lock(KEEPER, mpi.LOCK_EXCLUSIVE)
                self._window.Put([np.zeros(1, number), mpi.INT64_T], KEEPER)
                self._window.Unlock(KEEPER)
            communicator.Barrier()  # nobody adds before there is a zero
            self._window.Lock_all()

    def add(self, amount: int) -> int:
        """Add, and return what the number was before."""
        added, before = np.array([amount], np.int64), np.zeros(1, np.int64)
        kind = self._mpi.INT64_T
        with self._calling:
            request = self._window.Rget_accumulate(
                [added, kind], [before, kind], KEEPER, (0, 1, kind), self._mpi.SUM
            )

        def tested() -> bool | None:
            with self._calling:
                return request.Test() or None

        stream = self._stream
        wait_until(tested, stream, [stream.ranks[KEEPER]], stream.timeout_seconds)
        return int(before[0])
