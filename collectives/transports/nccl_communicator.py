"""Communicator: NCCL's, with a CUDA stream of its own and an end to every wait.

    caller's stream   ... produce the message | ready
                                                v
    own stream                                  wait for ready | NCCL's kernel | done <- polled

Nothing waits for the whole device. The host polls `done`, so that the caller's later work comes
after it on any stream. A kernel whose peer is gone never ends by itself: aborting the communicator
ends it, and the communicator cannot be used afterwards. NCCL's calls block, too, where ranks meet
for the first time; another thread makes such a call, while this one checks which ranks have left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from ..errors import PeerError
from ..vector import Array
from .gpu import Gpu, has_come, is_tensor, tensor_event
from .polling import wait_for_call, wait_until
from .transport import Transport

_GRACE_SECONDS: Final = 1.0  # for messages that a rank sent before it left
_ABORT_SECONDS: Final = 5.0  # the longest wait for an abort, as the GPU may hang

Enqueue = Callable[[Any, int], None]  # (NcclCommunicator, stream's address): NCCL's calls


class Communicator:
    """NCCL among the ranks of a host transport, which must all make the object together."""

    def __init__(self, host: Transport, gpu: Gpu, timeout_seconds: float) -> None:
        self._host = host
        self._gpu = gpu
        self.timeout_seconds = timeout_seconds  # the longest a rank waits for a peer
        self._nccl: Any = None
        self._stream: Any = None
        self._broken = ""
        self._met: set[Hashable] = set()
        # The arrays of a kernel that is not known to have ended.
        self._touched: Sequence[Array] = ()
        unique_id = self._share_id()

        def join() -> Any:
            # Non-blocking: else CUDA would order it with all that is on the legacy default stream.
            self._stream = gpu.cupy.cuda.Stream(non_blocking=True)
            return gpu.nccl.NcclCommunicator(host.size, unique_id, host.rank)

        self._nccl = self._call_in_thread(join, ())

    def _share_id(self) -> bytes:
        """Return NCCL's id for these ranks; rank 0 makes it. Raises PeerError where it cannot.

        Nothing else is sent over the host here: later failures are each rank's own.
        """
        unique_id, failure = b"", ""
        if self._host.rank == 0:
            try:
                unique_id = self._gpu.nccl.get_unique_id()
            except (RuntimeError, KeyError) as error:  # NCCL's, or CUDA's; of a status without name
                failure = f" ({error})"
        message = np.frombuffer(unique_id, np.uint8) if self._host.rank == 0 else None
        told = self._host.broadcast(message, root=0).tobytes()
        if not told:
            raise PeerError(f"rank {self._host.ranks[0]} could not make NCCL's id{failure}")
        return told

    def run(
        self,
        enqueue: Enqueue,
        touched: Sequence[Array],
        peers: Sequence[int] = (),
        meets: frozenset[Hashable] | None = None,
    ) -> None:
        """Run one group of NCCL's calls; return when it has ended.

        touched: the arrays it reads and writes; ready on the caller's current stream, of CuPy for
                 its arrays, of torch for tensors.
        peers:   the ranks that it waits for; empty: all ranks.
        meets:   the ranks that NCCL must be connected with for it; None: unknown.
        Raises PeerError after an abort, this one or an earlier one; CuPy's error where CUDA fails.
        """
        if self._broken:
            raise PeerError(self._broken)
        event = self._gpu.cupy.cuda.Event
        with self._gpu.device:
            ready = self._wait_for_caller(touched)
            self._touched = touched
            # Between ranks that have met the calls do not block, so no thread is needed.
            if meets is not None and meets <= self._met:
                self._unless_broken(lambda: self._group(enqueue), peers)
            else:
                self._call_in_thread(lambda: self._group(enqueue), peers)
                self._met |= meets or set()
            done = self._stream.record(event(disable_timing=True))
            self._wait(lambda: has_come(done, self._gpu.cupy) or None, peers)
            self._touched = ()
            del ready
        if self._broken:  # by another thread: an abort ends a kernel, too
            raise PeerError(self._broken)

    def _wait_for_caller(self, touched: Sequence[Array]) -> object:
        """Make the own stream wait for the caller's; return the event, to be kept until then."""
        cuda = self._gpu.cupy.cuda
        tensor = next(filter(is_tensor, touched), None)
        if tensor is not None:
            made = tensor_event(tensor)
            cuda.runtime.streamWaitEvent(self._stream.ptr, made.cuda_event, 0)
            return made
        ready = cuda.get_current_stream().record(cuda.Event(disable_timing=True))
        self._stream.wait_event(ready)
        return ready

    def _group(self, enqueue: Enqueue) -> None:
        self._gpu.nccl.groupStart()
        try:
            enqueue(self._nccl, self._stream.ptr)
        finally:
            # After an error, too: NCCL would hold this thread's later calls back.
            self._gpu.nccl.groupEnd()

    def _call_in_thread(self, call: Callable[[], Any], peers: Sequence[int]) -> Any:
        """Run a call that may block in another thread, which is abandoned on an error."""

        def make() -> Any:
            self._gpu.device.use()  # to go back to GPU 0 would open a context there
            return call()

        return wait_for_call(make, lambda test: self._wait(test, peers))

    def _wait(self, test: Callable[[], Any], peers: Sequence[int]) -> Any:
        ranks = [self._host.ranks[peer] for peer in peers]
        return self._unless_broken(
            lambda: wait_until(
                test,
                self._host,
                ranks,
                self.timeout_seconds,
                self._raise_async_error,
                _GRACE_SECONDS,
            ),
            peers,
        )

    def _raise_async_error(self) -> None:
        """Raise NCCL's asynchronous error, or the reason of an abort while this thread waited."""
        # A local: another thread's abort may set it to None in between.
        nccl = self._nccl
        if self._broken:
            raise PeerError(self._broken)
        if nccl is not None:
            nccl.check_async_error()

    def _unless_broken(self, action: Callable[[], Any], peers: Sequence[int]) -> Any:
        """Return the result of an action; abort when it fails."""
        try:
            return action()
        except (PeerError, self._gpu.cupy.cuda.runtime.CUDARuntimeError) as error:
            self.abort(str(error))
            raise
        # KeyError: CuPy has no name for NCCL's newest statuses.
        except (self._gpu.nccl.NcclError, KeyError) as error:
            ranks = [self._host.ranks[peer] for peer in peers] or list(self._host.ranks)
            text = (
                f"NCCL failed on rank {self._host.ranks[self._host.rank]} in "
                f"{self._host.activity}, between it and ranks {ranks}: {error}"
            )
            self.abort(text)
            raise PeerError(text) from error

    def abort(self, reason: str) -> None:
        """End all calls under way and free the communicator; later calls raise the reason."""
        self._broken = self._broken or reason
        # Taken away first: an abort by another thread finds none, and frees nothing twice.
        nccl, self._nccl = self._nccl, None
        if nccl is None:
            return

        def end() -> None:
            with suppress(RuntimeError):  # of a GPU that failed
                self._gpu.device.use()  # NCCL goes back to the thread's own
            nccl.abort()
            self._touched = ()  # only now: a kernel might have written there

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
