"""The direct transport: MPI, and messages of GPUs from memory to memory where it is CUDA-aware.

A message is announced with its size, and follows on the same stream of MPI's messages:

    send()     announce  wait for the caller's CUDA stream  Isend from the GPU
    receive()  learn the size, take GPU memory, wait until it is free  receive into it

Where messages are checked or paced, all of them are staged, as that is the host's work.

MPI does not follow CUDA's streams: the host polls an event until the message is made, or until
earlier work on the memory has ended.

Dense collectives are staged: MPI libraries reduce GPU memory in blocking calls only, which would
wait for ever for a rank that left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..vector import Array, is_on_device
from .cuda_aware import why_staged
from .gpu import has_come, has_gpu
from .mpi import MpiTransport
from .polling import wait_until
from .staged import StagedTransport
from .transfer_header import TransferHeader, TransferMethod
from .transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI


def open_mpi(
    communicator: MPI.Intracomm | None = None, timeout_seconds: float = 600.0
) -> Transport:
    """Return the MPI transport; where every rank has CuPy and a GPU, one for their messages, too.

    A collective. GPUs' messages are direct where the MPI library has passed the trial on every
    host, else staged through pinned host memory.
    """
    return open_for_gpus(MpiTransport(communicator, timeout_seconds))


def open_for_gpus(host: MpiTransport) -> Transport:
    """Return a transport for hosts' and GPUs' messages; `host` itself where a rank has no GPU."""
    if not _everywhere(host, has_gpu()):
        return host
    # One try for each host: its ranks use the same library.
    is_first_here = host.neighbours()[0] == host.rank
    if not _everywhere(host, not (is_first_here and why_staged())):
        return StagedTransport(host)
    return DirectTransport(host)


def _everywhere(transport: Transport, here: bool) -> bool:
    answer = np.array([here], np.int32)
    transport.allreduce(answer, "min")
    return bool(answer[0])


class DirectTransport(StagedTransport):
    """The ranks of an MPI transport, each with a GPU."""

    def __init__(
        self,
        host: Transport,
        *,
        carrier: MpiTransport | None = None,
        parent: DirectTransport | None = None,
    ) -> None:
        """host: the MPI transport, or a view of it; carrier: then the transport itself."""
        super().__init__(host, parent)
        self._carrier: MpiTransport = carrier or host  # type: ignore[assignment]

    def _over(self, host: Transport) -> DirectTransport:
        return DirectTransport(host, carrier=self._carrier, parent=self)

    def send(self, message: Array, to: int) -> Callable[[], None]:
        if not is_on_device(message) or self.handles_messages:
            return super().send(message, to)
        if message.dtype != np.uint8 or message.ndim != 1 or not message.flags.c_contiguous:
            raise ValueError(
                f"a message must be contiguous uint8 [m], got {message.dtype} "
                f"{list(message.shape)} with strides {message.strides} on rank "
                f"{self.ranks[self.rank]}"
            )
        header_sent = self.host.send(TransferHeader(TransferMethod.MPI, message.size).encode(), to)
        # MPI reads the memory at once, whatever CUDA's streams still have to write there.
        self._wait_for_stream(message)
        sent = self._carrier.send_on(self.host, message, self.ranks[to])

        def finish() -> None:
            header_sent()
            sent()

        return finish

    def _receive_body(self, header: TransferHeader, source: int) -> Array:
        if header.method is not TransferMethod.MPI:
            return super()._receive_body(header, source)
        # The pool may hand out memory that work under way on the stream still uses.
        message: Array = self._cupy.empty(header.message_bytes, np.uint8)
        self._wait_for_stream(message)
        self._carrier.receive_into_on(self.host, message, self.ranks[source])
        return message

    def _wait_for_stream(self, array: Array) -> None:
        """Wait until the current stream of an array's GPU has done its work so far."""
        cuda = self._cupy.cuda
        with array.device:  # type: ignore[attr-defined]
            done = cuda.get_current_stream().record(cuda.Event(disable_timing=True))
        wait_until(lambda: has_come(done, self._cupy) or None, self.host, [], self.timeout_seconds)

    def allgather(self, message: Array) -> list[Array]:
        """Return every rank's message; each is sent to every rank, P-1 times.

        Fewer and longer messages would take copies on the GPU.
        """
        if not is_on_device(message):
            return self.host.allgather(message)
        others = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        sources = others[::-1]
        received = self.exchange_all([(message, to) for to in others], sources)
        gathered = {self.rank: message, **dict(zip(sources, received, strict=True))}
        return [gathered[rank] for rank in range(self.size)]
