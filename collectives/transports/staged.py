"""The staged transport: any transport, and messages of GPUs through pinned host memory.

Host messages are sent unchanged; one of a GPU is copied to the host and announced, so that the
receiver copies it to its current GPU. All copies are ordered by the caller's current stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ..cost import Link
from ..errors import MismatchError
from ..vector import Array, is_on_device
from .counters import Counter
from .departure import DepartureNotice
from .gpu import host_copy, is_of_gpu, is_tensor, load_cupy, tensor_of
from .node_memory import NodeMemory
from .pacing import Clock
from .transfer_header import TransferHeader, TransferMethod
from .transport import Path, Step, Transport


class StagedTransport(Transport):
    """The ranks of another transport, its `host`, which also counts traffic and departures."""

    supports_device_messages = True

    def __init__(
        self, host: Transport, parent: StagedTransport | None = None, *, needs_cupy: bool = True
    ) -> None:
        """parent: the transport that this one is a view of.

        needs_cupy: whether to raise ImportError now where it is missing; else at its first use.
        """
        # If the host stages, too, use the transport below it.
        self.host: Transport = host.host if isinstance(host, StagedTransport) else host
        host = self.host
        super().__init__(host.ranks, host.rank, host.path, host.tag, host.traffic)
        self.name = host.name
        self.timeout_seconds = host.timeout_seconds
        self.full_speed_bytes = host.full_speed_bytes
        self.counts_allreduce = host.counts_allreduce
        self.announces_waits = host.announces_waits
        if parent is None and needs_cupy:
            load_cupy(self.name)
        self._views: dict[Path, StagedTransport] = {} if parent is None else parent._views
        self._making_a_view: threading.Lock = parent._making_a_view if parent else threading.Lock()

    @cached_property
    def _cupy(self) -> Any:
        return load_cupy(self.name)

    def send(self, message: Array, to: int) -> Callable[[], None]:
        if is_on_device(message):
            return self._send_with_header(TransferMethod.STAGED, self._to_host(message), to)
        # By chance it looks like a header, for which the receiver would take it.
        if TransferHeader.read(message):
            return self._send_with_header(TransferMethod.HOST, message, to)
        return self.host.send(message, to)

    def _send_with_header(
        self, method: TransferMethod, message: Array, to: int
    ) -> Callable[[], None]:
        header_sent = self.host.send(TransferHeader(method, message.size).encode(), to)
        sent = self.host.send(message, to)

        def finish() -> None:
            header_sent()
            sent()

        return finish

    def receive(self, source: int) -> Array:
        message = self.host.receive(source)
        header = TransferHeader.read(message)
        return message if header is None else self._receive_body(header, source)

    def _receive_body(self, header: TransferHeader, source: int) -> Array:
        """Return the message that was announced."""
        if header.method in (TransferMethod.NCCL, TransferMethod.MPI):
            raise MismatchError(
                f"rank {self.ranks[source]} sends over {header.method.name}, which rank "
                f"{self.ranks[self.rank]} is not connected to; all ranks must open the same "
                "transport, and `connect` together"
            )
        message = self.host.receive(source)
        return self._to_device(message) if header.method is TransferMethod.STAGED else message

    def _to_host(self, array: Array) -> Array:
        pinned = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1)), np.uint8)
        # Cut, as CuPy's pool rounds the size of what it hands out up.
        host = pinned[: array.nbytes].view(array.dtype)
        array.get(out=host)  # type: ignore[attr-defined]
        return host

    def _to_device(self, array: Array) -> Array:
        device: Array = self._cupy.asarray(array)  # through pinned memory of CuPy's
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
        if not is_of_gpu(array):
            return self.host.alltoall(array, bounds)
        if is_tensor(array):
            received, ends = self.host.alltoall(host_copy(array), bounds)
            return tensor_of(received, array), ends
        received, ends = self.host.alltoall(self._to_host(array), bounds)
        return self._to_device(received), ends

    def _on_host(self, array: Array, collective: Callable[[Array], None]) -> None:
        if not is_of_gpu(array):
            collective(array)
            return
        if is_tensor(array):
            host = host_copy(array)
            collective(host)
            array.copy_(tensor_of(host, array))  # type: ignore[attr-defined]
            return
        host = self._to_host(array)
        collective(host)
        with array.device:  # type: ignore[attr-defined]
            array.set(host)  # type: ignore[attr-defined]
            # Until the copy has ended, nobody else may get the host's memory.
            self._cupy.cuda.get_current_stream().synchronize()

    def barrier(self) -> None:
        self.host.barrier()

    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        host = self.host.view(step, ranks)
        with self._making_a_view:
            if host.path not in self._views:
                self._views[host.path] = self._over(host)
            return self._views[host.path]

    def _over(self, host: Transport) -> StagedTransport:
        return StagedTransport(host, parent=self)

    @property
    def activity(self) -> str:
        return self.host.activity

    @property
    def begun(self) -> int:
        return self.host.begun

    @property
    def checks_messages(self) -> bool:
        return self.host.checks_messages

    def native_bytes(self) -> int:
        return self.host.native_bytes()

    def check_messages(self) -> None:
        self.host.check_messages()

    @property
    def link(self) -> Link | None:
        return self.host.link

    def emulate(self, link: Link, clock: Clock | None = None) -> None:
        self.host.emulate(link, clock)

    @contextmanager
    def operation(self, activity: str) -> Iterator[None]:
        with self.host.operation(activity):
            yield

    def conclude(self) -> None:
        self.host.conclude()

    def missing(self, peer: int | None) -> str | None:
        return self.host.missing(peer)

    def departures(self) -> Mapping[int, DepartureNotice]:
        return self.host.departures()

    def collect_departures(self) -> None:
        self.host.collect_departures()

    def announce_departure(self, reason: str) -> None:
        self.host.announce_departure(reason)

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        return self.host.leave(reason, leave_timeout_seconds)

    def lose(self, rank: int, reason: str) -> None:
        self.host.lose(rank, reason)

    def abort(self, exit_code: int, reason: str = "") -> None:
        self.host.abort(exit_code, reason)

    def neighbours(self) -> list[int]:
        return self.host.neighbours()

    def counter(self) -> Counter:
        return self.host.counter()

    def shared_memory(self, size_bytes: int) -> NodeMemory:
        return self.host.shared_memory(size_bytes)

    def library(self) -> str:
        return self.host.library()
