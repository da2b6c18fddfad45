"""NCCL's dense collectives through torch.distributed, on tensors; for ranks without CuPy.

torch brings its own NCCL. The group works with any host transport: rank 0 serves a store, and sends
its address to the others over the host transport.

Every wait polls `is_completed` on the host: it ends after the transport's timeout, and when a peer
has left. So torch's own watchdog, which would end the process, never fires.

With backend "gloo" the same calls run on tensors in host memory, for tests without a GPU.
Over NCCL it has only run with a single rank.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np

from ..errors import PeerError
from .gpu import is_tensor
from .nccl_collectives import GpuGroup
from .reductions import parts_of
from .rendezvous import connect, import_torch
from .transport import Transport

_TORCH_TIMEOUT: Final = timedelta(
    days=365
)  # torch's timeout; the host transport's ends waits earlier

DTYPES: Final = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class TorchCollectives(GpuGroup):
    """A process group of a host transport's ranks, which must all create it together."""

    dtypes = DTYPES
    sends_messages = False

    def __init__(
        self, host: Transport, device: int, timeout_seconds: float, backend: str = "nccl"
    ) -> None:
        super().__init__(host, timeout_seconds, "NCCL" if backend == "nccl" else backend)
        self._torch = torch = import_torch()
        self._device = torch.device("cuda", device) if backend == "nccl" else torch.device("cpu")
        self._is_running = False
        self._called: set[object] = set()  # kinds of call that no longer block
        store = _open_store(host, timeout_seconds)

        def join() -> Any:
            if backend == "nccl":
                options = torch.distributed.ProcessGroupNCCL.Options()
                options._timeout = _TORCH_TIMEOUT
                make = torch.distributed.ProcessGroupNCCL
                return make(store, host.rank, host.size, options)
            return torch.distributed.ProcessGroupGloo(store, host.rank, host.size, _TORCH_TIMEOUT)

        self._group = self.call_in_thread(join)

    def use_device(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.set_device(self._device)

    def end_group(self, group: Any) -> None:
        if hasattr(group, "abort"):
            super().end_group(group)

    def abort(self, reason: str) -> None:
        if self._is_running:
            # Never destroy it: that would wait for calls under way, even at the program's end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        super().abort(reason)

    def sum_of_ranks(self) -> list[float]:
        """Return the sum of every rank's 1 + rank, four times, for a start-up test."""
        torch = self._torch
        array = torch.full((4,), self._host.rank + 1.0, dtype=torch.float32, device=self._device)
        self.allreduce(array, "sum")
        total: list[float] = array.tolist()
        return total

    def allreduce(self, array: Any, reduction: str) -> None:
        """Reduce in place."""
        array = self._tensor(array)
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = self._operator(reduction)
        self._run("allreduce", lambda group: [group.allreduce([array], options)])

    def reduce_scatter(self, array: Any, bounds: Sequence[int], reduction: str) -> None:
        """Reduce this rank's part, array[bounds[rank]:bounds[rank + 1]], in place."""
        array = self._tensor(array)

        def begin(group: Any) -> list[Any]:
            works = []
            for owner, first, end in parts_of(bounds):
                options = self._torch.distributed.ReduceOptions()
                options.reduceOp, options.rootRank = self._operator(reduction), owner
                works.append(group.reduce([array[first:end]], options))
            return works

        self._run("reduce", begin)

    def allgather_into(self, array: Any, bounds: Sequence[int]) -> None:
        """Fill the other ranks' parts of the array with theirs."""
        array = self._tensor(array)
        self._run(
            "broadcast",
            lambda group: [
                self._broadcast(group, array[first:end], owner)
                for owner, first, end in parts_of(bounds)
            ],
        )

    def broadcast_into(self, array: Any, root: int) -> None:
        """Fill the array with the root's."""
        array = self._tensor(array)
        self._run("broadcast", lambda group: [self._broadcast(group, array, root)])

    def alltoall(
        self,
        array: Any,
        bounds: Sequence[int],
        received: Any,
        received_bounds: Sequence[int],
    ) -> None:
        """Send part r to rank r, and receive the ranks' parts for this one, in rank order."""
        options = self._torch.distributed.AllToAllOptions()
        sizes, received_sizes = np.diff(bounds).tolist(), np.diff(received_bounds).tolist()
        sent, received = self._tensor(array)[bounds[0] : bounds[-1]], self._tensor(received)
        self._run(
            "alltoall",
            lambda group: [group.alltoall_base(received, sent, received_sizes, sizes, options)],
        )

    def _tensor(self, array: Any) -> Any:
        """Return an array as a tensor, including CuPy arrays on a rank that has CuPy."""
        return array if is_tensor(array) else self._torch.from_dlpack(array)

    def _broadcast(self, group: Any, part: Any, root: int) -> Any:
        options = self._torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return group.broadcast([part], options)

    def _operator(self, reduction: str) -> Any:
        return getattr(self._torch.distributed.ReduceOp, reduction.upper())

    def _run(self, kind: str, begin: Callable[[Any], list[Any]]) -> None:
        """Make torch's calls, and wait until their work has ended.

        Raises PeerError after this or an earlier abort.
        """
        self.require_usable()
        stream = (
            self._torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )

        def call() -> list[Any]:
            if stream is None:
                return begin(self._group)
            with self._torch.cuda.stream(stream):  # in this thread, wait for the caller's stream
                return begin(self._group)

        def all_completed() -> bool | None:
            return all(work.is_completed() for work in works) or None

        def run() -> list[Any]:
            # The first call of a kind connects the ranks, and blocks meanwhile.
            return call() if kind in self._called else self.call_in_thread(call)

        works: list[Any] = []
        # Stays set if `abort` follows an error, which must then keep the group alive.
        self._is_running = True
        works = self.abort_on_error(run)
        self._called.add(kind)
        self.wait(all_completed)
        # The work has ended; `wait` only raises its errors.
        for work in works:
            self.abort_on_error(work.wait)
        self._is_running = False


def _open_store(host: Transport, timeout_seconds: float) -> Any:
    """Return a store for the ranks; rank 0 serves it, and sends the others its address."""
    prefix_store = import_torch().distributed.PrefixStore
    store, text, failure = None, "", ""
    if host.rank == 0:
        try:
            is_one_host = len(host.neighbours()) == host.size
            # On one host use loopback, which needs no name resolution.
            address = "127.0.0.1" if is_one_host else socket.gethostname()
            store = connect(address, 0, 0, timeout_seconds)
            text = f"{address} {store.port} {secrets.token_hex(8)}"
        except (RuntimeError, OSError) as error:
            failure = f" ({error})"
    # The only message over the host: later failures are each rank's own.
    server: str = host.broadcast_object(text)
    if not server:
        raise PeerError(f"rank {host.ranks[0]} could not serve a store for torch's NCCL{failure}")
    address, port, token = server.split(" ")
    if store is None:
        store = connect(address, int(port), host.rank, timeout_seconds)
    return prefix_store(f"gtopk-{token}", store)
