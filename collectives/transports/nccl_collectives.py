"""NCCL's collectives through CuPy, in place on CuPy arrays and torch tensors.

The NCCL calls of one collective form one group: one kernel.

    parts of equal size    ncclReduceScatter, ncclAllGather, in place
    parts of other sizes   a group of ncclReduce, or ncclBroadcast, one for each part's owner

An NCCL communicator with its own CUDA stream, in which every wait ends:

    caller's stream   ... produce the message | ready
                                                v
    own stream                                  wait for ready | NCCL's kernel | done <- polled

Nothing waits for the whole device. The host polls `done`, so the caller's later work follows it on
any stream. A kernel waiting for a lost peer never ends by itself: aborting the communicator ends
it, and makes the communicator unusable. NCCL calls also block when ranks meet for the first time;
another thread makes such a call, while this one checks which ranks have left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import numpy as np

from ..errors import PeerError
from ..vector import Array
from .gpu import Gpu, is_reached, is_tensor, span_of, tensor_event
from .polling import wait_for_call, wait_until
from .reductions import LIBRARY_NAMES, parts_of
from .transport import Transport

_GRACE_SECONDS: Final = 1.0  # for messages that a rank sent before it left
_ABORT_SECONDS: Final = 5.0  # the longest wait for an abort, as the GPU may hang
DTYPES: Final = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)

Enqueue = Callable[[Any, int], None]  # (NcclCommunicator, stream's address): NCCL's calls


class GpuGroup:
    """A host transport's ranks in a GPU library; all ranks must create the object together.

    A call that fails aborts the library's group: calls under way end, and later ones fail.
    """

    own_errors: tuple[type[Exception], ...] = (PeerError,)  # pass these on unchanged
    library_errors: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(self, host: Transport, timeout_seconds: float, library: str) -> None:
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._library = library
        self._group: Any = None
        self._abort_reason = ""

    def set_timeout(self, seconds: float) -> None:
        """Set the longest wait for a peer."""
        self._timeout_seconds = seconds

    def use_device(self) -> None:
        """Make this rank's GPU current in the calling thread."""

    def end_group(self, group: Any) -> None:
        """End all calls under way in the library's group."""
        with suppress(RuntimeError):  # from a failed GPU
            group.abort()

    def abort(self, reason: str) -> None:
        """End all calls under way and free the group; later calls raise the reason."""
        self._abort_reason = self._abort_reason or reason
        # Take it away first, so that another thread's abort cannot free it twice.
        group, self._group = self._group, None
        if group is not None:
            thread = threading.Thread(target=self.end_group, args=(group,), daemon=True)
            thread.start()
            thread.join(_ABORT_SECONDS)

    def require_usable(self) -> None:
        """Raise PeerError with the reason if this or another thread has aborted."""
        if self._abort_reason:
            raise PeerError(self._abort_reason)

    def call_in_thread(self, call: Callable[[], Any], peers: Sequence[int] = ()) -> Any:
        """Run a call that may block in another thread, which is abandoned on an error."""

        def make() -> Any:
            self.use_device()
            return call()

        return wait_for_call(make, lambda test: self.wait(test, peers))

    def wait(self, test: Callable[[], Any], peers: Sequence[int] = ()) -> Any:
        """Call a test until its result is not None; peers: the ranks awaited, empty: all."""
        ranks = [self._host.ranks[peer] for peer in peers]
        on_check, seconds = self.require_usable, self._timeout_seconds
        return self.abort_on_error(
            lambda: wait_until(test, self._host, ranks, seconds, on_check, _GRACE_SECONDS), peers
        )

    def abort_on_error(self, action: Callable[[], Any], peers: Sequence[int] = ()) -> Any:
        """Return the result of an action; abort if it fails."""
        try:
            return action()
        except self.own_errors as error:
            self.abort(str(error))
            raise
        except self.library_errors as error:
            ranks = [self._host.ranks[peer] for peer in peers] or list(self._host.ranks)
            text = (
                f"{self._library} failed on rank {self._host.ranks[self._host.rank]} in "
                f"{self._host.activity}, between it and ranks {ranks}: "
                + str(error).partition("\n")[0]
            )
            self.abort(text)
            raise PeerError(text) from error


class CupyCollectives(GpuGroup):
    """NCCL among a host transport's ranks, which must all create the object together.

    Every rank passes arrays of the same sizes and dtypes; a call returns when its work has ended.
    """

    dtypes = DTYPES
    sends_messages = True

    def __init__(self, host: Transport, gpu: Gpu, timeout_seconds: float) -> None:
        super().__init__(host, timeout_seconds, "NCCL")
        self.own_errors = (PeerError, gpu.cupy.cuda.runtime.CUDARuntimeError)
        self.library_errors = (gpu.nccl.NcclError, KeyError)  # KeyError: a status unknown to CuPy
        self._gpu = gpu
        self._stream: Any = None
        self._connected_peers: set[Hashable] = set()
        # The arrays of a kernel that may still run.
        self._touched: Sequence[Array] = ()
        unique_id = self._share_id()

        def join() -> Any:
            # Non-blocking: else CUDA would order it with all work on the legacy default stream.
            self._stream = gpu.cupy.cuda.Stream(non_blocking=True)
            return gpu.nccl.NcclCommunicator(host.size, unique_id, host.rank)

        self._group = self.call_in_thread(join)

    def _share_id(self) -> bytes:
        """Return NCCL's id for these ranks, made by rank 0. Raises PeerError if that fails.

        Sends nothing else over the host: later failures are each rank's own.
        """
        unique_id, failure = b"", ""
        if self._host.rank == 0:
            try:
                unique_id = self._gpu.nccl.get_unique_id()
            except (RuntimeError, KeyError) as error:  # NCCL's or CUDA's; or an unknown status
                failure = f" ({error})"
        message = np.frombuffer(unique_id, np.uint8) if self._host.rank == 0 else None
        unique_id = self._host.broadcast(message, root=0).tobytes()
        if not unique_id:
            raise PeerError(f"rank {self._host.ranks[0]} could not create NCCL's id{failure}")
        return unique_id

    def use_device(self) -> None:
        self._gpu.device.use()  # not `with`, which would open a context on GPU 0 at its end

    def end_group(self, group: Any) -> None:
        with suppress(RuntimeError):  # from a failed GPU
            self.use_device()  # NCCL switches back to the thread's own
        group.abort()
        self._touched = ()  # only after the abort: a kernel might have written there

    def require_usable(self) -> None:
        """Also raise NCCL's asynchronous error."""
        # Keep a local: another thread's abort may set the attribute to None in between.
        group = self._group
        super().require_usable()
        if group is not None:
            group.check_async_error()

    def _run(
        self,
        enqueue: Enqueue,
        touched: Sequence[Array],
        peers: Sequence[int] = (),
        connections: frozenset[Hashable] | None = None,
    ) -> None:
        """Run one group of NCCL calls; return when it has ended.

        touched: the arrays that it reads and writes; ready on the caller's current stream: CuPy's
                 for its arrays, torch's for tensors.
        peers:   the ranks that it waits for; empty: all ranks.
        connections: the ranks that NCCL must be connected to for it; None: unknown.
        Raises PeerError after this or an earlier abort, CuPy's error if CUDA fails.
        """
        super().require_usable()
        event = self._gpu.cupy.cuda.Event
        with self._gpu.device:
            ready = self._wait_for_caller(touched)
            self._touched = touched
            # Calls between ranks that have met do not block, so they need no thread.
            if connections is not None and connections <= self._connected_peers:
                self.abort_on_error(lambda: self._enqueue(enqueue), peers)
            else:
                self.call_in_thread(lambda: self._enqueue(enqueue), peers)
                self._connected_peers |= connections or set()
            done = self._stream.record(event(disable_timing=True))
            self.wait(lambda: is_reached(done, self._gpu.cupy) or None, peers)
            self._touched = ()
            del ready
        super().require_usable()  # another thread's abort also ends a kernel

    def _wait_for_caller(self, touched: Sequence[Array]) -> object:
        """Make our stream wait for the caller's; return the event, to be kept until then."""
        cuda = self._gpu.cupy.cuda
        tensor = next(filter(is_tensor, touched), None)
        if tensor is not None:
            event = tensor_event(tensor)
            cuda.runtime.streamWaitEvent(self._stream.ptr, event.cuda_event, 0)
            return event
        ready = cuda.get_current_stream().record(cuda.Event(disable_timing=True))
        self._stream.wait_event(ready)
        return ready

    def _enqueue(self, enqueue: Enqueue) -> None:
        self._gpu.nccl.groupStart()
        try:
            enqueue(self._group, self._stream.ptr)
        finally:
            # Also after an error: otherwise NCCL would hold back this thread's later calls.
            self._gpu.nccl.groupEnd()

    def sum_of_ranks(self) -> list[float]:
        """Return the sum of every rank's 1 + rank, four times, for a start-up test."""

        def add_up() -> list[float]:
            self.use_device()
            array = self._gpu.cupy.asarray(np.full(4, self._host.rank + 1, np.float32))
            self.allreduce(array, "sum")
            total: list[float] = array.get().tolist()
            return total

        # In a separate thread, as the current GPU is per thread and the caller's must not change.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(add_up).result()

    def transfer(
        self, outgoing: Sequence[tuple[Array, int]], incoming: Sequence[tuple[Array, int]]
    ) -> None:
        """Send and receive bytes in one group of (array, peer); no array may be empty."""
        uint8 = self._gpu.nccl.NCCL_UINT8
        sends = [(span_of(array), to) for array, to in outgoing]
        receives = [(span_of(array), source) for array, source in incoming]

        def enqueue(nccl: Any, stream: int) -> None:
            for span, to in sends:
                nccl.send(span.address, span.size * span.itemsize, uint8, to, stream)
            for span, source in receives:
                nccl.recv(span.address, span.size * span.itemsize, uint8, source, stream)

        # Track each direction: NCCL connects each one between two ranks at its first use.
        connections = {
            *(("to", to) for _, to in sends),
            *(("from", source) for _, source in receives),
        }
        touched = [array for array, _ in (*outgoing, *incoming)]
        peers = sorted({peer for _, peer in connections})
        self._run(enqueue, touched, peers, frozenset(connections))

    def allreduce(self, array: Array, reduction: str) -> None:
        """Reduce in place."""
        span = span_of(array)
        dtype = self._constant(span.dtype.upper())
        operator = self._constant(LIBRARY_NAMES[reduction])
        self._run(
            lambda nccl, stream: nccl.allReduce(
                span.address, span.address, span.size, dtype, operator, stream
            ),
            [array],
        )

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str) -> None:
        """Reduce this rank's part, array[bounds[rank]:bounds[rank + 1]], in place."""
        span = span_of(array)
        dtype = self._constant(span.dtype.upper())
        operator = self._constant(LIBRARY_NAMES[reduction])
        parts = parts_of(bounds)

        def enqueue(nccl: Any, stream: int) -> None:
            if (length := _common_length(bounds)) is not None:
                first = span.address + bounds[0] * span.itemsize
                own = first + self._host.rank * length * span.itemsize
                # NCCL's in-place form: the output is the rank's own part of the input.
                nccl.reduceScatter(first, own, length, dtype, operator, stream)
                return
            for owner, begin, end in parts:
                place = span.address + begin * span.itemsize
                nccl.reduce(place, place, end - begin, dtype, operator, owner, stream)

        self._run(enqueue, [array])

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        """Fill the other ranks' parts of the array with theirs."""
        span = span_of(array)
        uint8, item = self._gpu.nccl.NCCL_UINT8, span.itemsize
        parts = parts_of(bounds)

        def enqueue(nccl: Any, stream: int) -> None:
            if (length := _common_length(bounds)) is not None:
                first = span.address + bounds[0] * item
                own = first + self._host.rank * length * item
                nccl.allGather(own, first, length * item, uint8, stream)
                return
            for owner, begin, end in parts:
                place = span.address + begin * item
                nccl.broadcast(place, place, (end - begin) * item, uint8, owner, stream)

        self._run(enqueue, [array])

    def broadcast_into(self, array: Array, root: int) -> None:
        """Fill the array with the root's."""
        span = span_of(array)
        size_bytes, uint8 = span.size * span.itemsize, self._gpu.nccl.NCCL_UINT8
        self._run(
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

    def _constant(self, name: str) -> int:
        number: int = getattr(self._gpu.nccl, f"NCCL_{name}")
        return number


def _common_length(bounds: Sequence[int]) -> int | None:
    """Return the common length of all parts; None if they differ."""
    sizes = {end - begin for begin, end in itertools.pairwise(bounds)}
    return sizes.pop() if len(sizes) == 1 else None
