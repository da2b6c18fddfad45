"""The NCCL transport: GPUs' messages over cupy.cuda.nccl, all others over its host transport.

NCCL's messages have no size of their own and are sent only while they are received. So each is
announced by a host message with its size, and none is begun before its receiver is there:

    send()          announce         ->  receive(): learn the size
                    ncclSend         ->  ncclRecv
    exchange_all()  announce all of them, then one group of ncclSend and ncclRecv

The announcement travels while the GPU still computes the message; a size over NCCL would cost a
kernel and a copy to the host, each waited for. And a rank that waits for a peer waits on the host,
where it learns that the peer has left; a kernel would wait for ever.

A send whose end is not waited for at once must not keep this rank from receiving, as NCCL's kernels
run one after the other: it is staged through the host. `exchange` and `exchange_all` never are.

Proven so far against a model of NCCL and CUDA in the tests; see tests/collectives/fake_cuda.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from .. import cost
from ..errors import MismatchError
from ..vector import Array, is_on_device
from .announcement import Announcement, Way
from .gpu import Gpu, choose_gpu
from .nccl_communicator import Communicator
from .staged import StagedTransport
from .transport import Transport

_DTYPES: Final = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_REDUCTIONS: Final = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}


class _Undecided(threading.local):
    """The send of this thread, over any view, that may still go over NCCL: one, or none."""

    stage: Callable[[], None] | None = None


class NcclTransport(StagedTransport):
    """The ranks of a host transport, with one GPU each.

    A view is connected by its own `connect`, or by its first collective on a GPU's array; until
    then it stages. Each connection takes GPU memory for NCCL's buffers.
    """

    counts_allreduce = False

    def __init__(
        self,
        bootstrap: Transport,
        device: int | None = None,
        timeout_seconds: float = 600.0,
        *,
        parent: NcclTransport | None = None,
    ) -> None:
        """device: the GPU's number; None: by this rank's place on its host.

        Raises, on all ranks alike, ImportError where CuPy or NCCL is missing, RuntimeError where a
        rank has no GPU of its own.
        """
        gpu = choose_gpu(bootstrap, device) if parent is None else parent._gpu
        super().__init__(bootstrap, parent)
        self.name = "nccl"
        self.counts_allreduce = False
        self._gpu: Gpu = gpu
        self._timeout_seconds = timeout_seconds
        self._communicators: list[Communicator] = []
        self._communicator: Communicator | None = None
        self._undecided: _Undecided = parent._undecided if parent else _Undecided()
        if parent is None:
            self.connect()
        else:
            self._communicators = parent._communicators

    @property
    def sends_from_device(self) -> bool:
        return self._communicator is not None

    def connect(self) -> None:
        if self._communicator is None:
            self._communicator = Communicator(self.host, self._gpu, self._timeout_seconds)
            self._communicators.append(self._communicator)

    def _over(self, host: Transport) -> NcclTransport:
        return NcclTransport(host, timeout_seconds=self._timeout_seconds, parent=self)

    def send(self, message: Array, to: int) -> Callable[[], None]:
        self._stage_undecided()
        if not is_on_device(message):
            return super().send(message, to)
        self._checked(message)
        if self._communicator is None or to == self.rank:
            return super().send(message, to)
        finish: Callable[[], None] | None = None

        def stage() -> None:
            nonlocal finish
            finish = super(NcclTransport, self).send(message, to)

        def sent() -> None:
            nonlocal finish
            if finish is None:
                self._undecided.stage = None
                finish = self._announce(message, to)
                self._transfer([(message, to)], [])
            finish()

        self._undecided.stage = stage
        return sent

    def _stage_undecided(self) -> None:
        """Send what would otherwise wait for an operation that comes first."""
        stage, self._undecided.stage = self._undecided.stage, None
        if stage is not None:
            stage()

    def _announce(self, message: Array, to: int) -> Callable[[], None]:
        return self.host.send(Announcement(Way.NCCL, message.size).encode(), to)

    def receive(self, source: int) -> Array:
        self._stage_undecided()
        return super().receive(source)

    def _follow(self, announcement: Announcement, source: int) -> Array:
        if announcement.way is not Way.NCCL or self._communicator is None:
            return super()._follow(announcement, source)
        received = self._empty(announcement.message_bytes)
        self._transfer([], [(received, source)])
        return received

    def exchange_all(
        self, messages: Iterable[tuple[Array, int]], sources: Sequence[int]
    ) -> Iterator[Array]:
        self._stage_undecided()
        if self._communicator is None:
            return super().exchange_all(messages, sources)
        sends, outgoing = [], []
        for message, to in messages:
            if is_on_device(message):
                outgoing.append((self._checked(message), to))
                sends.append(self._announce(message, to))
            else:
                sends.append(super().send(message, to))
        received, incoming = [], []
        for source in sources:
            message = self.host.receive(source)
            announcement = Announcement.read(message)
            if announcement is not None and announcement.way is Way.NCCL:
                message = self._empty(announcement.message_bytes)
                incoming.append((message, source))
            elif announcement is not None:
                message = self._follow(announcement, source)
            received.append(message)
        for sent in sends:
            sent()
        self._transfer(outgoing, incoming)
        return iter(received)

    def _transfer(
        self, outgoing: list[tuple[Array, int]], incoming: list[tuple[Array, int]]
    ) -> None:
        """Send and receive in one group; an empty message needs no NCCL."""
        outgoing = [pair for pair in outgoing if pair[0].size]
        incoming = [pair for pair in incoming if pair[0].size]
        if not outgoing and not incoming:
            return
        for message, _ in outgoing:
            self.traffic.count(message.size)
        uint8 = self._gpu.nccl.NCCL_UINT8

        def enqueue(nccl: Any, stream: int) -> None:
            for message, to in outgoing:
                nccl.send(_address(message), message.size, uint8, to, stream)
            for message, source in incoming:
                nccl.recv(_address(message), message.size, uint8, source, stream)

        meets = {*(("to", to) for _, to in outgoing), *(("from", source) for _, source in incoming)}
        touched = [message for message, _ in (*outgoing, *incoming)]
        self._run(enqueue, touched, sorted({peer for _, peer in meets}), frozenset(meets))

    def _run(
        self,
        enqueue: Callable[[Any, int], None],
        touched: Sequence[Array],
        peers: Sequence[int] = (),
        meets: frozenset[tuple[str, int]] | None = None,
    ) -> None:
        assert self._communicator is not None
        self._communicator.run(enqueue, touched, peers, meets)

    def allgather(self, message: Array) -> list[Array]:
        self._stage_undecided()
        if not is_on_device(message):
            return super().allgather(message)
        own = Announcement(Way.NCCL, self._checked(message).size).encode()
        announcements = [Announcement.read(m) for m in self.host.allgather(own)]
        bounds = [0]
        for rank, announcement in enumerate(announcements):
            if announcement is None or announcement.way is not Way.NCCL:
                raise MismatchError(
                    f"rank {self.ranks[rank]} gathers messages of hosts where rank "
                    f"{self.ranks[self.rank]} gathers messages of GPUs"
                )
            bounds.append(bounds[-1] + announcement.message_bytes)
        self.connect()
        everyones = self._empty(bounds[-1])
        with self._gpu.device:
            everyones[bounds[self.rank] : bounds[self.rank + 1]] = message
        self._allgather_into(everyones, bounds)
        return [everyones[a:b] for a, b in itertools.pairwise(bounds)]

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        """Reduce in place by NCCL's own allreduce; counted by formula, as MPI's is."""
        self._stage_undecided()
        if not is_on_device(array):
            self.host.allreduce(array, reduction)
            return
        dtype, operator = self._agree("allreduce", array, reduction, ())
        if self.size == 1 or not array.size:
            return
        self._run(
            lambda nccl, stream: nccl.allReduce(
                _address(array), _address(array), array.size, dtype, operator, stream
            ),
            [array],
        )
        self.traffic.count(
            cost.dense_bytes(array.size, self.size, array.itemsize), 2 * cost.rounds(self.size)
        )

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str = "sum") -> None:
        self._stage_undecided()
        if not is_on_device(array):
            self.host.reduce_scatter(array, bounds, reduction)
            return
        dtype, operator = self._agree("reduce_scatter", array, reduction, bounds)
        parts = _parts(array, bounds)
        if self.size == 1 or not parts:
            return

        def enqueue(nccl: Any, stream: int) -> None:
            # One reduction per owner: NCCL's own reduce_scatter knows equal parts only.
            for owner, part in parts:
                place = _address(part)
                nccl.reduce(place, place, part.size, dtype, operator, owner, stream)

        self._run(enqueue, [array])
        self._count_all_parts_but_own(array, bounds)

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        self._stage_undecided()
        if not is_on_device(array):
            self.host.allgather_into(array, bounds)
            return
        self._agree("allgather_into", array, "sum", bounds)
        self._allgather_into(array, bounds)

    def _allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        parts = _parts(array, bounds)
        if self.size == 1 or not parts:
            return
        uint8 = self._gpu.nccl.NCCL_UINT8

        def enqueue(nccl: Any, stream: int) -> None:
            for owner, part in parts:
                nccl.broadcast(_address(part), _address(part), part.nbytes, uint8, owner, stream)

        self._run(enqueue, [array])
        self._count_all_parts_but_own(array, bounds)

    def _count_all_parts_but_own(self, array: Array, bounds: Sequence[int]) -> None:
        own = bounds[self.rank + 1] - bounds[self.rank]
        others = bounds[-1] - bounds[0] - own
        self.traffic.count(others * array.itemsize, cost.rounds(self.size))

    def _agree(
        self, operation: str, array: Array, reduction: str, bounds: Sequence[int]
    ) -> tuple[int, int]:
        """Return NCCL's dtype and operator, when all ranks are here, connected, and mean the same.

        NCCL itself would hang, or worse. Raises MismatchError on all ranks alike.
        """
        self._check_place(array)
        ends = f" cut at {list(bounds)}" if bounds else ""
        own = f"{operation} ({reduction}) of {array.dtype} [{array.size}]{ends}"
        messages = self.host.allgather(np.frombuffer(own.encode(), np.uint8))
        texts = [message.tobytes().decode(errors="replace") for message in messages]
        for rank, text in zip(self.ranks, texts, strict=True):
            if text != texts[0]:
                raise MismatchError(
                    f"rank {rank} asks for {text} where rank {self.ranks[0]} asks for {texts[0]}; "
                    "all ranks must ask for the same"
                )
        if array.dtype.name not in _DTYPES:
            raise TypeError(f"NCCL reduces {', '.join(_DTYPES)}; got {array.dtype}")
        self.connect()
        nccl = self._gpu.nccl
        dtype: int = getattr(nccl, f"NCCL_{array.dtype.name.upper()}")
        operator: int = getattr(nccl, f"NCCL_{_REDUCTIONS[reduction]}")
        return dtype, operator

    def _checked(self, message: Array) -> Array:
        if message.dtype != np.uint8 or message.ndim != 1:
            raise ValueError(
                f"a message must be uint8 [m], got {message.dtype} {list(message.shape)}"
            )
        self._check_place(message)
        return message

    def _check_place(self, array: Array) -> None:
        device = array.device
        if device != self._gpu.device or not array.flags.c_contiguous:
            raise ValueError(
                f"rank {self.ranks[self.rank]} sends from {self._gpu.device}: an array must be "
                f"contiguous and there, got one on {device} with strides {array.strides}"
            )

    def _to_device(self, array: Array) -> Array:
        with self._gpu.device:
            return super()._to_device(array)

    def _empty(self, length: int) -> Array:
        # On the caller's current stream: what used this memory before has ended when NCCL begins.
        with self._gpu.device:
            array: Array = self._cupy.empty(length, np.uint8)
        return array

    def barrier(self) -> None:
        self._stage_undecided()
        super().barrier()

    def leave(self, reason: str, patience_seconds: float | None = None) -> list[int]:
        self._stage_undecided()
        late = super().leave(reason, patience_seconds)
        # Nothing is under way: every operation was waited for. To destroy would wait for peers.
        for communicator in self._communicators:
            communicator.abort(f"rank {self.ranks[self.rank]} left ({reason})")
        return late

    def library(self) -> str:
        version = self._gpu.nccl.get_version()
        return f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}"


def _address(array: Array) -> int:
    address: int = array.data.ptr  # type: ignore[attr-defined]
    return address


def _parts(array: Array, bounds: Sequence[int]) -> list[tuple[int, Array]]:
    """Return each owner with its part, where that is not empty."""
    parts = ((owner, array[a:b]) for owner, (a, b) in enumerate(itertools.pairwise(bounds)))
    return [(owner, part) for owner, part in parts if part.size]
