"""The counters of MPI's ranks: on one host in the memory of one rank, across hosts asked of it.

On one host an add is a one-sided call, in which the keeper takes no part. Over TCP MPI completes
one-sided calls only while the keeper calls MPI, several times for each, and a rank that computes
does not. So a thread of the keeper answers there, in one round trip.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from .counters import LocalCounter
from .polling import wait_until
from .transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

KEEPER: Final = 0  # the keeper's rank, in the communicator and in the stream
_QUESTION, _ANSWER = 0, 1  # tags
_PAUSE_SECONDS: Final = 0.0002  # between two polls of the answering thread
_NUMBER: Final = np.dtype(np.int64)


class WindowCounter:
    """A number in the memory of a communicator's rank 0.

    Rget_accumulate is a fetch-and-add that can be tested: a wait for it ends when the keeper is
    gone.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: MPI.Intracomm,
        stream: Transport,
        calling: AbstractContextManager[Any],
    ) -> None:
        """Make the counter; all ranks of the communicator call it, and MPI waits for all of them.

        calling: a context that is entered around every MPI call, where threads must take turns.
        """
        self._mpi = mpi
        self._stream = stream
        self._calling = calling
        keeps = stream.rank == KEEPER
        with calling:
            self._window = mpi.Win.Allocate(
                _NUMBER.itemsize if keeps else 0, _NUMBER.itemsize, comm=communicator
            )
            if keeps:
                self._window.Lock(KEEPER, mpi.LOCK_EXCLUSIVE)
                self._window.Put([np.zeros(1, _NUMBER), mpi.INT64_T], KEEPER)
                self._window.Unlock(KEEPER)
            communicator.Barrier()  # no rank adds before the number is zero
            # One epoch for ever. To lock and unlock for each add would block, without an end where
            # the keeper is gone.
            self._window.Lock_all()

    def add(self, amount: int) -> int:
        """Add, and return what the number was before."""
        added, before = np.array([amount], _NUMBER), np.zeros(1, _NUMBER)
        kind = self._mpi.INT64_T
        with self._calling:
            request = self._window.Rget_accumulate(
                [added, kind], [before, kind], KEEPER, (0, 1, kind), self._mpi.SUM
            )

        def tested() -> Literal[True] | None:
            with self._calling:
                return request.Test() or None

        _wait_for_keeper(tested, self._stream)
        return int(before[0])


class ServedCounter:
    """A number that a communicator's rank 0 keeps; a thread of that rank adds for the others."""

    def __init__(
        self,
        mpi: Any,
        communicator: MPI.Intracomm,
        stream: Transport,
        calling: AbstractContextManager[Any],
        is_over: Callable[[], bool],
    ) -> None:
        """Make the counter on a communicator of its own; all its ranks call it.

        is_over: tells whether MPI may not be called any more.
        """
        self._mpi = mpi
        self._communicator = communicator
        self._stream = stream
        self._calling = calling
        self._is_over = is_over
        self._number = LocalCounter()  # the keeper's
        self._asking = threading.Lock()
        if stream.rank == KEEPER:
            threading.Thread(target=self._answer_all, name="gtopk-counter", daemon=True).start()

    def add(self, amount: int) -> int:
        """Add, and return what the number was before."""
        if self._stream.rank == KEEPER:
            return self._number.add(amount)
        added, before = np.array([amount], _NUMBER), np.zeros(1, _NUMBER)
        with self._asking:  # one question at a time, so that the answer belongs to it
            with self._calling:
                answer = self._communicator.Irecv(before, KEEPER, _ANSWER)
                question = self._communicator.Isend(added, KEEPER, _QUESTION)

            def tested() -> Literal[True] | None:
                with self._calling:
                    return (question.Test() and answer.Test()) or None

            _wait_for_keeper(tested, self._stream)
        return int(before[0])

    def _answer_all(self) -> None:
        """Answer until this rank leaves."""
        status, amount = self._mpi.Status(), np.zeros(1, _NUMBER)
        answers: list[tuple[MPI.Request, np.ndarray]] = []
        while not self._is_over():
            with self._calling:
                # A poll: a blocking receive would hold the lock, and could not be ended when this
                # rank leaves.
                question = self._communicator.Improbe(self._mpi.ANY_SOURCE, _QUESTION, status)
                if question is not None:
                    question.Recv(amount)
                    before = np.array([self._number.add(int(amount[0]))], _NUMBER)
                    request = self._communicator.Isend(before, status.source, _ANSWER)
                    answers.append((request, before))  # MPI reads it until it is sent
                answers = [pair for pair in answers if not pair[0].Test()]
            if question is None:
                time.sleep(_PAUSE_SECONDS)


def _wait_for_keeper(tested: Callable[[], Literal[True] | None], stream: Transport) -> None:
    wait_until(tested, stream, [stream.ranks[KEEPER]], stream.timeout_seconds)
