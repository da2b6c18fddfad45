"""The NCCL transport: GPU messages over NCCL, all others over its host transport.

NCCL messages carry no size and are sent only while they are received. So a host message announces
each one with its size, and none begins before its receiver is there:

    send()          announce         ->  receive(): learn the size
                    ncclSend         ->  ncclRecv
    exchange_all()  announce all of them, then one group of ncclSend and ncclRecv

The header travels while the GPU still computes the message. A rank that waits for a peer waits on
the host, where it learns that the peer has left; a kernel would wait for ever.

NCCL's kernels run one after the other. So a send that is not waited for at once must not keep this
rank from receiving: it is staged through the host. `exchange` and `exchange_all` never are.

NCCL is reached through CuPy. Without CuPy, dense collectives use torch's NCCL on tensors. If the
ranks can use neither (`device_choice`), everything is staged.

With several ranks only tested against a model of NCCL and CUDA so far; see
tests/collectives/fake_cuda.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final

import numpy as np

from .. import cost
from ..errors import MismatchError, PeerError
from ..vector import Array, is_on_device
from .device_choice import GpuRoute, RouteChoice, choose, fall_back_after_test, version_text
from .gpu import (
    Gpu,
    current_device,
    gather_facts,
    is_gpu_array,
    is_tensor,
    load_nccl,
    open_gpu,
    own_gpu_number,
    require_message,
    require_place,
    span_of,
    visible_gpus,
)
from .nccl_collectives import CupyCollectives
from .reductions import loses_nan, parts_of
from .staged import StagedTransport, TransferHeader, TransferMethod
from .torch_collectives import TorchCollectives
from .transport import Step, Transport

_START_TEST_SECONDS: Final = 60.0  # limit for connecting and the first allreduce

Collectives = CupyCollectives | TorchCollectives


class _DeferredSend(threading.local):
    """This thread's send, over any view, that may still use NCCL: one, or none."""

    stage: Callable[[], None] | None = None


class NcclTransport(StagedTransport):
    """The ranks of a host transport, with one GPU each.

    A view connects in its own `connect`, or at its first collective on a GPU array; until then it
    stages. Each connection takes GPU memory for NCCL's buffers.
    An automatic transport connects in the same way, and keeps staging if the ranks cannot use NCCL.
    `choice` then gives the reason; `on_choice` is called with it.
    """

    def __init__(
        self,
        bootstrap: Transport,
        device: int | None = None,
        timeout_seconds: float = 600.0,
        *,
        parent: NcclTransport | None = None,
        automatic: bool = False,
        on_choice: Callable[[RouteChoice], None] = lambda choice: None,
        torch_backend: str = "nccl",
    ) -> None:
        """device: the GPU's number; None: by this rank's place on its host.

        bootstrap: the host transport; it only carries host messages here.
        torch_backend: "gloo", on the host, replaces torch's NCCL in tests.
        Unless automatic, raises on all ranks alike ImportError if NCCL is missing, RuntimeError if
        a rank does not have its own GPU.
        """
        if parent is not None:
            automatic, on_choice = parent.automatic, parent.on_choice
            torch_backend = parent._torch_backend
        super().__init__(bootstrap, parent)
        if not isinstance(bootstrap, StagedTransport):
            bootstrap = StagedTransport(bootstrap)
        self._staged_host = bootstrap
        self.automatic: bool = automatic
        # A view of an automatic transport makes its own choice among its ranks.
        self.choice: RouteChoice | None = parent.choice if parent and not automatic else None
        self.on_choice: Callable[[RouteChoice], None] = on_choice
        self._device = device
        self._gpu: Gpu | None = None if parent is None else parent._gpu
        self._torch_backend: str = torch_backend
        self._timeout_seconds = timeout_seconds
        self._connected: list[Collectives] = [] if parent is None else parent._connected
        self._collectives: Collectives | None = None
        self._all_on_gpu: dict[Hashable, bool] = {}  # all ranks' answer, by `key` of `carrying`
        self._deferred: _DeferredSend = parent._deferred if parent else _DeferredSend()
        if not automatic:
            self.name, self.counts_allreduce = "nccl", False
            if parent is None:
                self._require_nccl()
                self.connect()

    def _require_nccl(self) -> None:
        """Find NCCL and a GPU for every rank; raise on all ranks alike if that is impossible."""
        if self._device is None:
            self._device = own_gpu_number(self.host)
        self.choice = choose(gather_facts(self.host, self._device), self.ranks)
        if self._is_staged():
            load_nccl()  # if it is missing on this rank, raises with installation advice
            raise RuntimeError(
                f"transport 'nccl' needs NCCL and a GPU for each rank: {self.choice.reason}; "
                "open_transport('staged', bootstrap=...) goes through pinned host memory instead"
            )

    @property
    def sends_from_device(self) -> bool:
        return self._collectives is not None and self._collectives.sends_messages

    def carries(self, tensor: Any) -> bool:
        kind, device = "cuda" if self._torch_backend == "nccl" else "cpu", tensor.device
        # CuPy's collectives support these dtypes, too.
        is_known = span_of(tensor).dtype in (*TorchCollectives.dtypes, "bool")
        if self._is_staged() or device.type != kind or not is_known:
            return False
        return device.type == "cpu" or self._device in (None, device.index)

    def carrying(self, on_gpu: bool, key: Hashable = None) -> Transport:
        if not self.automatic or self._is_staged():
            return self
        # All ranks call in the same order, so all come here for a new `key`; later calls send none.
        if key not in self._all_on_gpu:
            answer = np.array([on_gpu], np.int32)
            self.host.allreduce(answer, "min")
            self._all_on_gpu[key] = bool(answer[0])
            if on_gpu and not self._all_on_gpu[key]:
                reason = "some ranks have their vectors on the host"
                self.on_choice(RouteChoice(GpuRoute.STAGED, reason))
        if self._all_on_gpu[key] and not on_gpu:
            raise ValueError(
                f"rank {self.ranks[self.rank]} has a vector on the host, but every rank had its "
                "vectors on a GPU before: move it there, or set GTOPK_TRANSPORT=staged"
            )
        return self if self._all_on_gpu[key] else self._staged_host

    @property
    def tensor_place(self) -> str:
        if self._torch_backend != "nccl":
            return "cpu"
        if self._device is not None:
            return f"cuda:{self._device}"
        # Not the thread's current GPU, which may be another rank's.
        return f"cuda:{self.host.neighbours().index(self.rank) % (visible_gpus() or 1)}"

    def connect(self, device: int | None = None) -> None:
        """Connect NCCL, once; device: the GPU if automatic, None: the current one."""
        if self._collectives is not None or self._is_staged():
            return
        if not self.automatic:
            self._open(self._timeout_seconds)
            return
        if self._device is None:
            self._device = current_device() if device is None else device
        choice = choose(gather_facts(self.host, self._device), self.ranks)
        if choice.route is not GpuRoute.STAGED:
            choice = self._try(choice)
        self.choice = choice
        # NCCL's own allreduce is counted by formula.
        self.counts_allreduce = self.counts_allreduce and self._is_staged()
        self.on_choice(choice)

    def _is_staged(self) -> bool:
        return self.choice is not None and self.choice.route is GpuRoute.STAGED

    def _try(self, choice: RouteChoice) -> RouteChoice:
        """Connect; return the choice, or staging if the trial failed."""
        failure, self.choice = "", choice
        try:
            # A rank that fails at once still waits for the others' results, within its timeout.
            self._open(min(self._timeout_seconds / 2, _START_TEST_SECONDS))
        except Exception as error:  # from CuPy, CUDA, NCCL or torch: report it to all ranks
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        tried = fall_back_after_test(choice, self.host.gather_object(failure), self.ranks)
        if tried is not choice and self._collectives is not None:
            self._collectives.abort(tried.reason)
            self._connected.remove(self._collectives)
            self._collectives = None
        return tried

    def _open(self, seconds: float) -> None:
        """Connect the ranks, and test a sum over them; seconds: the longest wait for a peer.

        Raises PeerError if a rank does not come or the sum is wrong, and errors from CUDA, NCCL and
        torch. After any failure, none of its host messages is still in transit.
        """
        assert self.choice is not None
        host = self.host
        opened: Collectives
        if self.choice.route is GpuRoute.TORCH:
            opened = TorchCollectives(host, self._device or 0, seconds, backend=self._torch_backend)
        else:
            self._gpu = self._gpu or open_gpu(self._device)
            opened = CupyCollectives(host, self._gpu, seconds)
        try:
            total, expected = opened.sum_of_ranks(), host.size * (host.size + 1) / 2
            if total != [expected] * len(total):
                raise PeerError(
                    f"{self.choice.route.value} sums 1 to {host.size} over the ranks to "
                    f"{total[0]:g} instead of {expected:g} on rank {host.ranks[host.rank]}"
                )
        except BaseException as error:
            # A kernel of the test may still wait for a peer, and would do so for ever.
            opened.abort(f"its start-up test failed: {error}")
            raise
        # Only the start has the short timeout.
        opened.set_timeout(self._timeout_seconds)
        self._connected.append(opened)
        self._collectives = opened

    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        host_view = self._staged_host.view(step, ranks)
        with self._views_lock:
            if host_view.path not in self._views:
                view = NcclTransport(host_view, self._device, self._timeout_seconds, parent=self)
                self._views[host_view.path] = view
            return self._views[host_view.path]

    def send(self, message: Array, to: int) -> Callable[[], None]:
        self._stage_deferred()
        if not is_on_device(message):
            return self._staged_host.send(message, to)
        self._checked(message)
        if not self.sends_from_device or to == self.rank:
            return self._staged_host.send(message, to)
        finish: Callable[[], None] | None = None

        def stage() -> None:
            nonlocal finish
            finish = self._staged_host.send(message, to)

        def sent() -> None:
            nonlocal finish
            if finish is None:
                # Nothing came in between: this rank can wait in NCCL until its peer receives.
                self._deferred.stage = None
                finish = self._announce(TransferMethod.NCCL, message, to)
                self._transfer([(message, to)], [])
            finish()

        self._deferred.stage = stage
        return sent

    def _stage_deferred(self) -> None:
        """Stage the deferred send, as another operation comes before the wait for it."""
        stage, self._deferred.stage = self._deferred.stage, None
        if stage is not None:
            stage()

    def receive(self, source: int) -> Array:
        self._stage_deferred()
        return super().receive(source)

    def _receive_body(self, header: TransferHeader, source: int) -> Array:
        if header.method is not TransferMethod.NCCL or not self.sends_from_device:
            with self._current():
                return self._staged_host._receive_body(header, source)
        received = self._empty(header.message_bytes)
        self._transfer([], [(received, source)])
        return received

    def exchange_all(
        self, messages: Iterable[tuple[Array, int]], sources: Sequence[int]
    ) -> Iterator[Array]:
        self._stage_deferred()
        if not self.sends_from_device:
            return super().exchange_all(messages, sources)
        sends, outgoing = [], []
        for message, to in messages:
            if is_on_device(message):
                outgoing.append((self._checked(message), to))
                sends.append(self._announce(TransferMethod.NCCL, message, to))
            else:
                sends.append(self._staged_host.send(message, to))
        received, incoming = [], []
        for source in sources:
            message = self.host.receive(source)
            header = TransferHeader.read(message)
            if header is not None and header.method is TransferMethod.NCCL:
                message = self._empty(header.message_bytes)
                incoming.append((message, source))
            elif header is not None:
                message = self._receive_body(header, source)
            received.append(message)
        # Before NCCL: a host message may only advance while this rank calls the host transport, and
        # the receiver needs it before it joins the group.
        for sent in sends:
            sent()
        self._transfer(outgoing, incoming)
        return iter(received)

    def _transfer(
        self, outgoing: list[tuple[Array, int]], incoming: list[tuple[Array, int]]
    ) -> None:
        """Send and receive in one group; empty messages do not use NCCL."""
        outgoing = [pair for pair in outgoing if pair[0].size]
        incoming = [pair for pair in incoming if pair[0].size]
        if not outgoing and not incoming:
            return
        for message, _ in outgoing:
            self.traffic.count(message.size)
        assert isinstance(self._collectives, CupyCollectives)
        self._collectives.transfer(outgoing, incoming)

    def allgather(self, message: Array) -> list[Array]:
        self._stage_deferred()
        if not is_on_device(message):
            return self.host.allgather(message)
        own = TransferHeader(TransferMethod.NCCL, self._checked(message).size).encode()
        headers = [TransferHeader.read(m) for m in self.host.allgather(own)]
        bounds = [0]
        for rank, header in enumerate(headers):
            if header is None or header.method is not TransferMethod.NCCL:
                raise MismatchError(
                    f"rank {self.ranks[rank]} gathers host messages, but rank "
                    f"{self.ranks[self.rank]} gathers GPU messages"
                )
            bounds.append(bounds[-1] + header.message_bytes)
        # A collective: only now is it certain that all ranks have their messages on GPUs.
        self.connect(span_of(message).device)
        if self._collectives is None:
            with self._current():
                return self._staged_host.allgather(message)
        gathered = self._empty(bounds[-1])
        with self._current():
            gathered[bounds[self.rank] : bounds[self.rank + 1]] = message
        self._fill(gathered, bounds)
        return [gathered[a:b] for a, b in itertools.pairwise(bounds)]

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        """Reduce in place with NCCL's own allreduce; counted by formula, like MPI's.

        "min" and "max" of floats go through the host, as NCCL's may lose a NaN.
        """
        collectives = self._agree("allreduce", array, reduction)
        if collectives is None or loses_nan(reduction, span_of(array).dtype):
            self._staged_host.allreduce(array, reduction)
            return
        span = span_of(array)
        if self.size > 1 and span.size:
            collectives.allreduce(array, reduction)
            self.traffic.count_allreduce(span.size, span.itemsize, self.size)

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str = "sum") -> None:
        collectives = self._agree("reduce_scatter", array, reduction, bounds)
        if collectives is None or loses_nan(reduction, span_of(array).dtype):
            self._staged_host.reduce_scatter(array, bounds, reduction)
            return
        if self.size > 1 and parts_of(bounds):
            collectives.reduce_scatter(array, bounds, reduction)
            self._count_all_parts_but_own(array, bounds)

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        collectives = self._agree("allgather_into", array, bounds=bounds)
        if collectives is None:
            self._staged_host.allgather_into(array, bounds)
            return
        self._fill(array, bounds)

    def _fill(self, array: Array, bounds: Sequence[int]) -> None:
        if self.size > 1 and parts_of(bounds) and self._collectives is not None:
            self._collectives.allgather_into(array, bounds)
            self._count_all_parts_but_own(array, bounds)

    def broadcast_into(self, array: Array, root: int) -> None:
        collectives = self._agree(f"broadcast_into from rank {self.ranks[root]}", array)
        if collectives is None:
            self._staged_host.broadcast_into(array, root)
            return
        span = span_of(array)
        if self.size > 1 and span.size:
            collectives.broadcast_into(array, root)
            sent = span.size * span.itemsize if self.rank == root else 0
            self.traffic.count(sent, cost.rounds(self.size))

    def alltoall(self, array: Array, bounds: Sequence[int]) -> tuple[Array, list[int]]:
        collectives = self._agree("alltoall", array)
        if collectives is None:
            return self._staged_host.alltoall(array, bounds)
        # NCCL must know the sizes to receive, which only the senders know.
        gathered = self.host.allgather(np.diff(bounds).astype(np.int64).view(np.uint8))
        sizes = [int(message.view(np.int64)[self.rank]) for message in gathered]
        ends = [0, *itertools.accumulate(sizes)]
        span = span_of(array)
        if is_tensor(array):
            received: Any = array.new_empty(ends[-1])  # type: ignore[attr-defined]
        else:
            received = self._empty(ends[-1] * span.itemsize).view(array.dtype)
        collectives.alltoall(array, bounds, received, ends)
        self._count_all_parts_but_own(array, bounds)
        return received, ends

    def _count_all_parts_but_own(self, array: Array, bounds: Sequence[int]) -> None:
        own = bounds[self.rank + 1] - bounds[self.rank]
        others = bounds[-1] - bounds[0] - own
        self.traffic.count(others * span_of(array).itemsize, cost.rounds(self.size))

    def _agree(
        self, operation: str, array: Array, reduction: str = "", bounds: Sequence[int] | None = None
    ) -> Collectives | None:
        """Return NCCL's collectives, once all ranks are connected and agree on the operation.

        None: use the staged host transport, which also takes host arrays. Raises MismatchError on
        all ranks alike.
        """
        self._stage_deferred()
        if not is_gpu_array(array):
            return None
        span = span_of(self._placed(array))
        kind = f" ({reduction})" if reduction else ""
        length = "" if operation == "alltoall" else f" [{span.size}]"  # may differ in an alltoall
        cut = "" if bounds is None else f" cut at {list(bounds)}"
        own = f"{operation}{kind} of {span.dtype}{length}{cut}"
        # First: `connect` is a collective, too, and ranks that disagree would hang in NCCL or
        # compute nonsense.
        texts = self.host.gather_object(own)
        for rank, text in zip(self.ranks, texts, strict=True):
            if text != texts[0]:
                raise MismatchError(
                    f"rank {rank} calls {text}, but rank {self.ranks[0]} calls {texts[0]}; all "
                    "ranks must call the same operation"
                )
        self.connect(span.device)
        if self._collectives is None:
            return None
        if reduction and span.dtype not in self._collectives.dtypes:
            raise TypeError(f"NCCL reduces {', '.join(self._collectives.dtypes)}; got {span.dtype}")
        return self._collectives

    def _checked(self, message: Array) -> Array:
        require_message(message)
        return self._placed(message)

    def _placed(self, array: Array) -> Array:
        """Return the array; raise ValueError unless it is contiguous on this rank's GPU."""
        own = None if self._gpu is None else self._gpu.device.id
        require_place(array, own, self.ranks[self.rank])
        return array

    def _current(self) -> Any:
        """Return a context that makes this rank's GPU the current one."""
        return nullcontext() if self._gpu is None else self._gpu.device

    def _empty(self, length: int) -> Array:
        # On the caller's current stream: earlier work on this memory ends before NCCL writes to it.
        with self._current():
            array: Array = self._cupy.empty(length, np.uint8)
        return array

    def barrier(self) -> None:
        self._stage_deferred()
        super().barrier()

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        self._stage_deferred()
        remaining = super().leave(reason, leave_timeout_seconds)
        self.disconnect(f"rank {self.ranks[self.rank]} left ({reason})")
        return remaining

    def disconnect(self, reason: str) -> None:
        """Abort NCCL on all views; none of its calls may be under way."""
        # Abort, because destroying a communicator would wait for peers.
        for connected in self._connected:
            connected.abort(reason)

    def library(self) -> str:
        if self.automatic:
            return self.host.library()
        assert self.choice is not None
        gpu = self._gpu
        return f"NCCL {version_text(gpu.nccl.get_version())}" if gpu else str(self.choice)
