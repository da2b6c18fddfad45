"""NCCL's collectives through CuPy, on CuPy's arrays and torch's tensors, where they lie.

Several calls of one collective are one group of NCCL's: one kernel.

    parts of equal size    ncclReduceScatter, ncclAllGather, in place
    of any other           a group of ncclReduce, or ncclBroadcast, one for each part's owner
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from ..vector import Array
from .gpu import Gpu, span_of
from .nccl_communicator import Communicator
from .reductions import LIBRARY_NAMES, parts_of
from .transport import Transport

DTYPES: Final = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)


class CupyCollectives:
    """NCCL among the ranks of a host transport, which must all make the object together.

    Every rank passes arrays of the same sizes and dtypes; a call returns when its work has ended.
    """

    dtypes = DTYPES
    sends_messages = True

    def __init__(self, host: Transport, gpu: Gpu, timeout_seconds: float) -> None:
        self._gpu = gpu
        self._rank, self._size = host.rank, host.size
        self.communicator = Communicator(host, gpu, timeout_seconds)

    def set_timeout(self, seconds: float) -> None:
        """Set the longest wait for a peer."""
        self.communicator.timeout_seconds = seconds

    def abort(self, reason: str) -> None:
        """End all calls under way; later calls fail."""
        self.communicator.abort(reason)

    def sum_of_ranks(self) -> list[float]:
        """Return the sum of every rank's 1 + rank, four times, for a start-up test."""

        def add_up() -> list[float]:
            self._gpu.device.use()  # not `with`: going back to GPU 0 would open a context there
            array = self._gpu.cupy.asarray(np.full(4, self._rank + 1, np.float32))
            self.allreduce(array, "sum")
            total: list[float] = array.get().tolist()
            return total

        # In a thread of its own: the current GPU is a thread's, and the caller's stays what it is.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(add_up).result()

    def transfer(
        self, outgoing: Sequence[tuple[Array, int]], incoming: Sequence[tuple[Array, int]]
    ) -> None:
        """Send and receive bytes, in one group; (array, peer) with no array empty."""
        uint8 = self._gpu.nccl.NCCL_UINT8
        sends = [(span_of(array), to) for array, to in outgoing]
        receives = [(span_of(array), source) for array, source in incoming]

        def enqueue(nccl: Any, stream: int) -> None:
            for span, to in sends:
                nccl.send(span.address, span.size * span.itemsize, uint8, to, stream)
            for span, source in receives:
                nccl.recv(span.address, span.size * span.itemsize, uint8, source, stream)

        # Each way apart: NCCL connects either way between two ranks at its own first use.
        meets = {*(("to", to) for _, to in sends), *(("from", source) for _, source in receives)}
        touched = [array for array, _ in (*outgoing, *incoming)]
        peers = sorted({peer for _, peer in meets})
        self.communicator.run(enqueue, touched, peers, frozenset(meets))

    def allreduce(self, array: Array, reduction: str) -> None:
        """Reduce in place."""
        span = span_of(array)
        dtype, operator = self._dtype(span.dtype), self._operator(reduction)
        self.communicator.run(
            lambda nccl, stream: nccl.allReduce(
                span.address, span.address, span.size, dtype, operator, stream
            ),
            [array],
        )

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str) -> None:
        """Reduce this rank's part, array[bounds[rank]:bounds[rank + 1]], in place."""
        span = span_of(array)
        dtype, operator = self._dtype(span.dtype), self._operator(reduction)
        parts = parts_of(bounds)

        def enqueue(nccl: Any, stream: int) -> None:
            if (each := _each(bounds)) is not None:
                first = span.address + bounds[0] * span.itemsize
                own = first + self._rank * each * span.itemsize
                # In place, to NCCL: the result goes to where the rank's own part lies in what is
                # sent.
                nccl.reduceScatter(first, own, each, dtype, operator, stream)
                return
            for owner, begin, end in parts:
                place = span.address + begin * span.itemsize
                nccl.reduce(place, place, end - begin, dtype, operator, owner, stream)

        self.communicator.run(enqueue, [array])

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        """Fill the other ranks' parts of the array with those that they have."""
        span = span_of(array)
        uint8, item = self._gpu.nccl.NCCL_UINT8, span.itemsize
        parts = parts_of(bounds)

        def enqueue(nccl: Any, stream: int) -> None:
            if (each := _each(bounds)) is not None:
                first = span.address + bounds[0] * item
                own = first + self._rank * each * item
                nccl.allGather(own, first, each * item, uint8, stream)
                return
            for owner, begin, end in parts:
                place = span.address + begin * item
                nccl.broadcast(place, place, (end - begin) * item, uint8, owner, stream)

        self.communicator.run(enqueue, [array])

    def broadcast_into(self, array: Array, root: int) -> None:
        """Fill the array with the root's."""
        span = span_of(array)
        size_bytes, uint8 = span.size * span.itemsize, self._gpu.nccl.NCCL_UINT8
        self.communicator.run(
            lambda nccl, stream: nccl.broadcast(
                span.address, span.address, size_bytes, uint8, root, stream
            ),
            [array],
        )

    def alltoall(
        self,
        array: Array,
        bounds: Sequence[int],
        received: Array,
        received_bounds: Sequence[int],
    ) -> None:
        """Send part r to rank r, and receive the ranks' parts for this one, in rank order."""
        outgoing = [(array[begin:end], to) for to, begin, end in parts_of(bounds)]
        incoming = [
            (received[begin:end], source) for source, begin, end in parts_of(received_bounds)
        ]
        if outgoing or incoming:
            self.transfer(outgoing, incoming)

    def _dtype(self, name: str) -> int:
        number: int = getattr(self._gpu.nccl, f"NCCL_{name.upper()}")
        return number

    def _operator(self, reduction: str) -> int:
        number: int = getattr(self._gpu.nccl, f"NCCL_{LIBRARY_NAMES[reduction]}")
        return number


def _each(bounds: Sequence[int]) -> int | None:
    """Return the length of all parts; None where they are not equally long."""
    sizes = {end - begin for begin, end in itertools.pairwise(bounds)}
    return sizes.pop() if len(sizes) == 1 else None
