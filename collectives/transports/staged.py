"""The staged transport: any transport, with GPU messages sent through pinned host memory.

Host messages are sent unchanged. A GPU message is copied to the host and announced, so that the
receiver copies it to its current GPU. The caller's current stream orders all copies.

The transfer header announces it in a host message that says how it will follow:

    byte 0            8        16              24
         +------------+--------+---------------+
         | "GTKDEV/1" | method | message_bytes |     little-endian
         +------------+--------+---------------+

A host message gets a header of its own only if its bytes look like a transfer header.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import MismatchError
from ..vector import Array, is_on_device
from .carrier import Overlay
from .counters import Counter, NodeMemory
from .gpu import host_copy, is_gpu_array, is_tensor, load_cupy, tensor_of
from .transport import Path, Step, Transport

_FIELDS: Final = struct.Struct("<8sqq")
_MAGIC: Final = b"GTKDEV/1"
TRANSFER_HEADER_BYTES: Final = _FIELDS.size


class TransferMethod(IntEnum):
    """How the message is sent, and in which memory it arrives."""

    NCCL = 0  # from GPU to GPU
    STAGED = 1  # as the next host message, then copied to the receiver's GPU
    HOST = 2  # as the next host message, which stays on the host
    MPI = 3  # from GPU to GPU, as the next message of a CUDA-aware MPI


class TransferHeader(NamedTuple):
    """The method and size of the following message."""

    method: TransferMethod
    message_bytes: int

    def encode(self) -> Array:
        """Return the host message, uint8 [TRANSFER_HEADER_BYTES]."""
        return np.frombuffer(_FIELDS.pack(_MAGIC, self.method, self.message_bytes), np.uint8)

    @classmethod
    def read(cls, message: Array) -> TransferHeader | None:
        """Parse a host message; None if it is not a transfer header."""
        if message.size != TRANSFER_HEADER_BYTES:
            return None
        magic, method, message_bytes = _FIELDS.unpack(message.data)
        # As a tuple: before Python 3.12 `in` on an enum raises for a number that is not a
        # member.
        if magic != _MAGIC or method not in tuple(TransferMethod) or message_bytes < 0:
            return None
        return cls(TransferMethod(method), message_bytes)


class StagedTransport(Overlay):
    """The ranks of another transport, the `host`, which also counts traffic and departures."""

    supports_device_messages = True

    def __init__(self, host: Transport, parent: StagedTransport | None = None) -> None:
        """parent: the transport of which this one is a view."""
        # If the host also stages, use the transport below it.
        host = host.host if isinstance(host, StagedTransport) else host
        super().__init__(host, host.ranks, host.rank, host.path, host.tag, host.traffic)
        self.full_speed_bytes = host.full_speed_bytes
        self.counts_allreduce = host.counts_allreduce
        self._views: dict[Path, StagedTransport] = {} if parent is None else parent._views
        self._views_lock: threading.Lock = parent._views_lock if parent else threading.Lock()

    @cached_property
    def _cupy(self) -> Any:
        return load_cupy(self.name)

    def send(self, message: Array, to: int) -> Callable[[], None]:
        if is_on_device(message):
            return self._send_with_header(TransferMethod.STAGED, self._to_host(message), to)
        # The bytes look like a header by chance, and the receiver would take them for one.
        if TransferHeader.read(message):
            return self._send_with_header(TransferMethod.HOST, message, to)
        return self.host.send(message, to)

    def _send_with_header(
        self, method: TransferMethod, message: Array, to: int
    ) -> Callable[[], None]:
        header_sent = self._announce(method, message, to)
        sent = self.host.send(message, to)

        def finish() -> None:
            header_sent()
            sent()

        return finish

    def _announce(self, method: TransferMethod, message: Array, to: int) -> Callable[[], None]:
        return self.host.send(TransferHeader(method, message.size).encode(), to)

    def receive(self, source: int) -> Array:
        message = self.host.receive(source)
        header = TransferHeader.read(message)
        return message if header is None else self._receive_body(header, source)

    def _receive_body(self, header: TransferHeader, source: int) -> Array:
        """Return the announced message."""
        if header.method in (TransferMethod.NCCL, TransferMethod.MPI):
            raise MismatchError(
                f"rank {self.ranks[source]} sends over {header.method.name}, which rank "
                f"{self.ranks[self.rank]} is not connected to; all ranks must open the same "
                "transport, and `connect` together"
            )
        message = self.host.receive(source)
        return self._to_device(message) if header.method is TransferMethod.STAGED else message

    def _to_host(self, array: Array) -> Array:
        if is_tensor(array):
            return host_copy(array)
        pinned = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1)), np.uint8)
        # Cut to size, as CuPy's pool rounds allocations up.
        host = pinned[: array.nbytes].view(array.dtype)
        array.get(out=host)  # type: ignore[attr-defined]
        return host

    def _to_device(self, array: Array) -> Array:
        device: Array = self._cupy.asarray(array)  # through CuPy's pinned memory
        return device

    def allgather(self, message: Array) -> list[Array]:
        if not is_on_device(message):
            return self.host.allgather(message)
        return [self._to_device(m) for m in self.host.allgather(self._to_host(message))]

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        self._on_host(array, lambda host: self.host.allreduce(host, reduction))

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str = "sum") -> None:
        self._on_host(array, lambda host: self.host.reduce_scatter(host, bounds, reduction))

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        self._on_host(array, lambda host: self.host.allgather_into(host, bounds))

    def broadcast_into(self, array: Array, root: int) -> None:
        self._on_host(array, lambda host: self.host.broadcast_into(host, root))

    def alltoall(self, array: Array, bounds: Sequence[int]) -> tuple[Array, list[int]]:
        if not is_gpu_array(array):
            return self.host.alltoall(array, bounds)
        received, ends = self.host.alltoall(self._to_host(array), bounds)
        return tensor_of(received, array) if is_tensor(array) else self._to_device(received), ends

    def _on_host(self, array: Array, collective: Callable[[Array], None]) -> None:
        if not is_gpu_array(array):
            collective(array)
            return
        host = self._to_host(array)
        collective(host)
        if is_tensor(array):
            array.copy_(tensor_of(host, array))  # type: ignore[attr-defined]
            return
        with array.device:  # type: ignore[attr-defined]
            array.set(host)  # type: ignore[attr-defined]
            # The host memory must not be reused until the copy has ended.
            self._cupy.cuda.get_current_stream().synchronize()

    def barrier(self) -> None:
        self.host.barrier()

    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        host = self.host.view(step, ranks)
        with self._views_lock:
            if host.path not in self._views:
                self._views[host.path] = type(self)(host, self)
            return self._views[host.path]

    @property
    def activity(self) -> str:
        return self.host.activity

    @property
    def begun(self) -> int:
        return self.host.begun

    def native_bytes(self) -> int:
        return self.host.native_bytes()

    @contextmanager
    def operation(self, activity: str) -> Iterator[None]:
        with self.host.operation(activity):
            yield

    def conclude(self) -> None:
        self.host.conclude()

    def missing(self, peer: int | None) -> str | None:
        return self.host.missing(peer)

    def neighbours(self) -> list[int]:
        return self.host.neighbours()

    def counter(self) -> Counter:
        return self.host.counter()

    def shared_memory(self, size_bytes: int) -> NodeMemory:
        return self.host.shared_memory(size_bytes)
