"""A model of the parts of CuPy, CUDA and NCCL that the transports use, strict about misuse.

All GPUs are in this process, and ranks are threads of it. Streams run in threads of their own, with
a delay. Misuse is recorded in `misuses`, or has the effect that it has on a GPU:

    memory read before its event is garbage; new memory is still written by its last user
    an address is looked up when the kernel runs; if the memory was freed by then, that is misuse
    a communicator's groups run one after the other, each after all earlier ones have ended
    sends and receives with different counts, or collectives of different shapes, never end
    the first call between two ranks, and making a communicator, block until the other side arrives
    after an abort, and on another device than the communicator's, calls fail
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import queue
import sys
import threading
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from collectives.kernels.device import cuda as cuda_machine

LATE_SECONDS = 0.0005  # delay of each kernel, so that no result is right by luck
OPERATORS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}
_INTEGERS = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]
DTYPES = dict(enumerate([*_INTEGERS, np.float16, np.float32, np.float64]))
NAMES = {
    **{f"NCCL_{np.dtype(dtype).name.upper()}": number for number, dtype in DTYPES.items()},
    "NCCL_BFLOAT16": 9,
    "NCCL_SUM": 0,
    "NCCL_PROD": 1,
    "NCCL_MAX": 2,
    "NCCL_MIN": 3,
}


class NcclError(RuntimeError):
    """The error of cupy.cuda.nccl."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR {status}")
        self.status = status


class CUDARuntimeError(RuntimeError):
    """The error of cupy.cuda.runtime."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA status {status}")
        self.status = status


class SwitchedOff(BaseException):
    """The model has been switched off."""


class Cuda:
    """The machine: its GPUs, their streams and memory, and NCCL between them."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.misuses: list[str] = []
        self.off = threading.Event()
        self.changed = threading.Condition()
        self.streams: dict[int, Stream] = {}
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.failed: set[int] = set()  # GPUs on which a kernel has failed, as will all later calls
        self.memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self.thread = threading.local()
        self.opened: set[int] = set()  # GPUs with a context, which set_device creates
        self.null_streams = [Stream(self, gpu) for gpu in range(gpus)]
        self.cliques: dict[bytes, Clique] = {}
        self.moved_bytes = 0
        self.copies: list[tuple[str, int, int]] = []  # "up" or "down", a GPU, bytes
        self.launches: list[int] = []  # of kernels, by their GPU
        self.communicators: list[Communicator] = []
        self.abort_hangs = False
        self.library: Any = None  # the CUDA kernels, compiled for the host
        self.one_kernel = threading.Lock()
        self.random = np.random.default_rng(7)

    @property
    def device(self) -> int:
        return getattr(self.thread, "device", 0)

    def set_device(self, number: int) -> None:
        self.thread.device = number
        self.opened.add(number)

    def report_misuse(self, text: str) -> None:
        self.misuses.append(text)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait for a change that makes the test true; raise SwitchedOff if the model is off."""
        with self.changed:
            while not test():
                if self.off.is_set():
                    raise SwitchedOff
                self.changed.wait(0.1)

    def change(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def garbage(self, count: int) -> np.ndarray:
        return self.random.integers(0, 256, count, np.uint8)

    def bytes_at(self, address: int, count: int, device: int) -> np.ndarray:
        """Return the memory at an address; report if it was freed, or is another device's."""
        for start, memory in list(self.memories.items()):
            if start <= address and address + count <= start + memory.content.size:
                if memory.device != device:
                    self.report_misuse(
                        f"an address of GPU {memory.device} was given to GPU {device}"
                    )
                return memory.content[address - start : address - start + count]
        self.report_misuse(f"{count} bytes were used after they were freed")
        return np.zeros(count, np.uint8)

    def query(self, event: int) -> int:
        """Return CUDA's status of an event: 0 done, 600 not ready, 700 a kernel has failed."""
        if self.device in self.failed:
            return 700
        return 0 if self.events[event].done else 600

    def stream_wait_event(self, stream: int, event: int, flags: int = 0) -> None:
        self.streams[stream].wait_event(self.events[event])

    def modules(self) -> dict[str, types.ModuleType]:
        """Return the modules to put into sys.modules."""
        cupy, cuda, nccl = map(types.ModuleType, ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
        cupy.cuda, cuda.nccl = cuda, nccl
        cupy.ndarray = ndarray
        cupy.empty = lambda length, dtype: empty(self, length, np.dtype(dtype))
        cupy.zeros = lambda length, dtype: zeros(self, length, np.dtype(dtype))
        cupy.asarray = lambda host: asarray(self, host)
        cupy.ascontiguousarray = lambda array: array
        cupy.flatnonzero = lambda array: array.sized_by_values(np.flatnonzero)
        cupy.packbits = lambda array: array.computed(np.packbits, array)
        cupy.unpackbits = lambda array: array.computed(np.unpackbits, array)
        cupy.RawModule = lambda code, options, name_expressions: RawModule(self)
        cupy.asnumpy = lambda array: array.get()
        cuda.Device = lambda number=None: Device(self, self.device if number is None else number)
        cuda.Event = lambda disable_timing: Event(self)
        cuda.Stream = lambda non_blocking: Stream(self, self.device)
        cuda.get_current_stream = lambda: current_stream(self)
        cuda.alloc_pinned_memory = lambda count: bytearray(count + 512)
        cuda.runtime = types.SimpleNamespace(
            getDeviceCount=lambda: self.gpus,
            eventQuery=self.query,
            check_status=check_status,
            streamWaitEvent=self.stream_wait_event,
            CUDARuntimeError=CUDARuntimeError,
        )
        nccl.available = True
        nccl.NcclError = NcclError
        nccl.get_version = lambda: 23203
        nccl.get_unique_id = lambda: self.random.bytes(128)
        nccl.groupStart = lambda: group_start(self)
        nccl.groupEnd = lambda: group_end(self)
        nccl.NcclCommunicator = lambda size, unique_id, rank: Communicator(
            self, size, unique_id, rank
        )
        for name, number in NAMES.items():
            setattr(nccl, name, number)
        return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


# ---- CUDA


class Device:
    attributes: ClassVar = {"MultiProcessorCount": 1}

    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda = cuda
        self.id = number
        self.pci_bus_id = f"0000:{number:02x}:00.0"
        self._before = threading.local()

    def __enter__(self) -> Device:
        stack = self._before.__dict__.setdefault("stack", [])
        stack.append(self.cuda.device)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        self.cuda.set_device(self._before.stack.pop())

    def use(self) -> None:
        self.cuda.set_device(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    __hash__ = None

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def synchronize(self) -> None:
        self.cuda.report_misuse("the whole device was waited for")


def check_status(status: int) -> None:
    if status:
        raise CUDARuntimeError(status)


class Event:
    numbers = itertools.count(0x9000)

    def __init__(self, cuda: Cuda) -> None:
        self.ptr = next(self.numbers)
        cuda.events[self.ptr] = self
        self._reached: threading.Event | None = None

    @property
    def done(self) -> bool:
        return self._reached is None or self._reached.is_set()


class Stream:
    """Runs tasks in order, in a thread of its own."""

    numbers = itertools.count(0x5000)

    def __init__(self, cuda: Cuda, device: int) -> None:
        self.cuda = cuda
        self.device = device
        self.ptr = next(self.numbers)
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        cuda.streams[self.ptr] = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.cuda.off.is_set():
            try:
                task = self.tasks.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                task()
            except SwitchedOff:
                pass
            except Exception as error:
                self.cuda.report_misuse(f"a kernel failed: {error!r}")
            del task  # and the memory that it keeps alive

    def __enter__(self) -> Stream:
        self.cuda.thread.__dict__.setdefault("current", []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.cuda.thread.current.pop()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self.cuda)
        event._reached = reached = threading.Event()
        self.tasks.put(reached.set)
        return event

    def wait_event(self, event: Event) -> None:
        reached = event._reached
        if reached is not None:
            self.tasks.put(lambda: self._until(reached))

    def synchronize(self) -> None:
        reached = threading.Event()
        self.tasks.put(reached.set)
        self._until(reached)

    def _until(self, reached: threading.Event) -> None:
        while not reached.wait(0.1) and not self.cuda.off.is_set():
            pass


def current_stream(cuda: Cuda) -> Stream:
    current = getattr(cuda.thread, "current", [])
    return current[-1] if current else cuda.null_streams[cuda.device]


class Memory:
    def __init__(self, content: np.ndarray, device: int) -> None:
        self.content = content
        self.device = device


class ndarray:
    """An array on a GPU, of one dimension or none. All its operations are delayed kernels.

    The host reads only by `get`, or by operations for which CuPy calls it: converting to a number,
    or making an array whose size depends on values.
    """

    __module__ = "cupy"
    __hash__ = None

    def __init__(self, cuda: Cuda, memory: Memory, content: np.ndarray) -> None:
        self.cuda = cuda
        self.memory = memory
        self._content = content  # for kernels only
        self.ndim = content.ndim
        self.dtype = content.dtype
        self.size = content.size
        self.nbytes = content.nbytes
        self.itemsize = content.itemsize
        self.shape = content.shape
        self.strides = content.strides
        self.flags = types.SimpleNamespace(c_contiguous=content.flags.c_contiguous)
        self.data = types.SimpleNamespace(ptr=content.__array_interface__["data"][0])
        self.device = Device(cuda, memory.device)

    def __getitem__(self, part: Any) -> ndarray:
        if isinstance(part, ndarray) and part.dtype == np.bool_:
            return self.sized_by_values(lambda content: content[part._content])
        if isinstance(part, ndarray) and part.ndim:
            return self.computed(lambda content, at: content[at], self, part)
        if not isinstance(part, slice):
            return ndarray(self.cuda, self.memory, self._content[int(part) :][:1].reshape(()))
        return ndarray(self.cuda, self.memory, self._content[part])

    def __setitem__(self, part: Any, value: Any) -> None:
        assert isinstance(value, ndarray | int | float), "CuPy wants an array of its own"
        self.launch(lambda: self._content.__setitem__(content_of(part), content_of(value)))

    def launch(self, kernel: Callable[[], Any]) -> None:
        self.cuda.launches.append(self.memory.device)

        def delayed() -> None:
            time.sleep(LATE_SECONDS)
            kernel()

        current_stream(self.cuda).tasks.put(delayed)

    def computed(self, function: Callable[..., np.ndarray], *operands: Any) -> ndarray:
        """Return a function's result, computed later; only values may depend on values."""
        like = [
            np.zeros_like(operand._content) if isinstance(operand, ndarray) else operand
            for operand in operands
        ]
        with np.errstate(all="ignore"):
            shape = np.asarray(function(*like))
        computed = empty(self.cuda, shape.size, shape.dtype)
        computed = ndarray(self.cuda, computed.memory, computed._content.reshape(shape.shape))

        def kernel() -> None:
            with np.errstate(all="ignore"):
                computed._content[...] = function(*map(content_of, operands))

        self.launch(kernel)
        return computed

    def sized_by_values(self, function: Callable[[np.ndarray], np.ndarray]) -> ndarray:
        """Return a function's result whose size depends on values: the host waits for the size."""
        current_stream(self.cuda).synchronize()
        self.cuda.copies.append(("down", self.memory.device, 8))
        found = function(self._content)
        computed = empty(self.cuda, found.size, found.dtype)
        self.launch(lambda: computed._content.__setitem__(..., function(self._content)))
        return computed

    def __lt__(self, other: Any) -> ndarray:
        return self.computed(operator.lt, self, other)

    def __le__(self, other: Any) -> ndarray:
        return self.computed(operator.le, self, other)

    def __gt__(self, other: Any) -> ndarray:
        return self.computed(operator.gt, self, other)

    def __ge__(self, other: Any) -> ndarray:
        return self.computed(operator.ge, self, other)

    def __eq__(self, other: Any) -> Any:
        return self.computed(operator.eq, self, other)

    def __ne__(self, other: Any) -> Any:
        return self.computed(operator.ne, self, other)

    def __and__(self, other: Any) -> ndarray:
        return self.computed(operator.and_, self, other)

    def __sub__(self, other: Any) -> ndarray:
        return self.computed(operator.sub, self, other)

    def __truediv__(self, other: Any) -> ndarray:
        return self.computed(operator.truediv, self, other)

    def __invert__(self) -> ndarray:
        return self.computed(operator.invert, self)

    def astype(self, dtype: Any) -> ndarray:
        return self.computed(lambda content: content.astype(dtype), self)

    def copy(self) -> ndarray:
        return self.computed(np.copy, self)

    def any(self) -> ndarray:
        return self.computed(np.any, self)

    def min(self) -> ndarray:
        return self.computed(np.min, self)

    def max(self) -> ndarray:
        return self.computed(np.max, self)

    def searchsorted(self, values: ndarray, side: str = "left") -> ndarray:
        return self.computed(
            lambda content, wanted: content.searchsorted(wanted, side), self, values
        )

    def item(self) -> Any:
        return self.get().item()

    __int__ = __bool__ = item

    def tolist(self) -> list[Any]:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return self.get().tobytes()

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self.cuda, self.memory, self._content.view(dtype))

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        current_stream(self.cuda).synchronize()
        self.cuda.copies.append(("down", self.memory.device, self.nbytes))
        out = np.empty(self.shape, self.dtype) if out is None else out
        out[...] = self._content
        return out

    def set(self, host: np.ndarray) -> None:
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        self.cuda.copies.append(("up", self.memory.device, self.nbytes))
        host = host if is_pinned(host) else host.copy()  # CUDA stages pageable memory at once
        held = weakref.ref(host) if is_pinned(host) else lambda: host

        def copy() -> None:
            if (content := held()) is None:
                self.cuda.report_misuse(
                    "memory of the host was given away while a copy was to read it"
                )
            else:
                self._content[...] = content

        self.launch(copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # For mpi4py: this model's memory can be read even by an MPI that is not CUDA-aware.
        return {
            "data": (self.data.ptr, False),
            "shape": self.shape,
            "strides": None,
            "typestr": self.dtype.str,
            "version": 3,
        }

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a GPU's array was read entry by entry")


def is_pinned(host: np.ndarray) -> bool:
    """Tell whether this memory came from `alloc_pinned_memory`."""
    owner: Any = host
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, bytearray | memoryview)


def content_of(operand: Any) -> Any:
    return operand._content if isinstance(operand, ndarray) else operand


class RawModule:
    """Kernels compiled for the host: see machine_on_host.py."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def get_function(self, name: str) -> Callable[..., None]:
        cuda = self.cuda

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            def kernel() -> None:
                time.sleep(LATE_SECONDS)
                held = [
                    ctypes.c_void_p(argument.data.ptr)
                    if isinstance(argument, ndarray)
                    else (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
                    for argument in arguments
                ]
                count = len(held)
                pointers = (ctypes.c_void_p * count)(*map(ctypes.addressof, held))
                sizes = (ctypes.c_size_t * count)(*map(ctypes.sizeof, held))
                with cuda.one_kernel:
                    error = cuda.library.launch(
                        name.encode(), *grid, *block, pointers, sizes, count, ctypes.c_uint64(0)
                    )
                if error is not None:
                    cuda.report_misuse(f"{name}: {error.decode()}")

            cuda.launches.append(cuda.device)
            for argument in arguments:
                if isinstance(argument, ndarray) and argument.memory.device != cuda.device:
                    cuda.report_misuse(f"{name} got an array of another GPU")
            current_stream(cuda).tasks.put(kernel)

        return launch


def zeros(cuda: Cuda, length: int, dtype: np.dtype[Any]) -> ndarray:
    array = empty(cuda, length, dtype)
    array[:] = 0
    return array


def empty(cuda: Cuda, length: int, dtype: np.dtype[Any]) -> ndarray:
    content = np.zeros(max(length * dtype.itemsize, 1), np.uint8)
    memory = Memory(content, cuda.device)
    cuda.memories[content.__array_interface__["data"][0]] = memory
    garbage = cuda.garbage(content.size)

    def last_user() -> None:
        time.sleep(LATE_SECONDS)
        content[:] = garbage

    current_stream(cuda).tasks.put(last_user)
    return ndarray(cuda, memory, content[: length * dtype.itemsize].view(dtype))


def asarray(cuda: Cuda, host: Any) -> ndarray:
    if isinstance(host, ndarray):
        return host
    array = empty(cuda, host.size, host.dtype)
    cuda.copies.append(("up", cuda.device, host.nbytes))
    copy = ndarray(cuda, Memory(np.empty(0), 0), host.copy())
    array[...] = copy
    return array


# ---- NCCL


class Operation:
    """One call between groupStart and groupEnd."""

    def __init__(self, shape: tuple[Any, ...], source: int, into: int, count: int, dtype: int):
        self.shape = shape  # must be the same on all ranks of a collective
        self.source = source
        self.into = into
        self.count = count
        self.dtype = np.dtype(DTYPES[dtype])
        self.done = False


class Clique:
    """The communicators with the same unique id."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: dict[int, Communicator] = {}
        self.status = 0
        self.met: set[tuple[Any, ...]] = set()
        self.sends: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        self.collectives: dict[int, dict[int, Operation]] = defaultdict(dict)


class Communicator:
    def __init__(self, cuda: Cuda, size: int, unique_id: bytes, rank: int) -> None:
        assert isinstance(unique_id, bytes)
        assert len(unique_id) == 128
        self.cuda, self.rank, self.device = cuda, rank, cuda.device
        self.aborted = False
        self.async_status = 0
        self.begun = self.ended = 0  # groups
        self.collectives = 0
        with cuda.changed:
            self.clique = clique = cuda.cliques.setdefault(unique_id, Clique(size))
            if any(other.device == self.device for other in clique.members.values()):
                clique.status = 5
            clique.members[rank] = self
            cuda.communicators.append(self)
            cuda.changed.notify_all()
        cuda.wait(lambda: len(clique.members) == size or clique.status > 0)
        if clique.status:
            raise NcclError(clique.status)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._add(("send", peer), source, 0, count, dtype, stream)

    def recv(self, into: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._add(("recv", peer), 0, into, count, dtype, stream)

    def allReduce(
        self, source: int, into: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._add(("allreduce", count, dtype, op), source, into, count, dtype, stream)

    def reduce(
        self, source: int, into: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        self._add(("reduce", count, dtype, op, root), source, into, count, dtype, stream)

    def broadcast(
        self, source: int, into: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        self._add(("broadcast", count, dtype, root), source, into, count, dtype, stream)

    def reduceScatter(
        self, source: int, into: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._add(("reduceScatter", count, dtype, op), source, into, count, dtype, stream)

    def allGather(self, source: int, into: int, count: int, dtype: int, stream: int) -> None:
        self._add(("allGather", count, dtype), source, into, count, dtype, stream)

    def _add(
        self, shape: tuple[Any, ...], source: int, into: int, count: int, dtype: int, stream: int
    ) -> None:
        self._require_use()
        group_start(self.cuda)
        operation = Operation(shape, source, into, count, dtype)
        self.cuda.thread.group.append((self, self.cuda.streams[stream], operation))
        group_end(self.cuda)

    def _require_use(self) -> None:
        if self.cuda.device != self.device:
            self.cuda.report_misuse(
                f"GPU {self.device}'s communicator was used on GPU {self.cuda.device}"
            )
        if self.aborted:
            raise NcclError(4)

    def check_async_error(self) -> None:
        if self.aborted or self.async_status:
            raise NcclError(self.async_status or 4)

    def abort(self) -> None:
        if self.cuda.abort_hangs:
            self.cuda.off.wait()
        before = self.cuda.device
        self.cuda.set_device(self.device)
        self.aborted = True
        self.cuda.set_device(before)
        self.cuda.change()

    def destroy(self) -> None:
        self.cuda.report_misuse("destroy waits for peers")

    def meet(self, operations: list[Operation]) -> None:
        """Block until all peers of these operations have reached theirs, the first time."""
        met, size, rank = self.clique.met, self.clique.size, self.rank
        needed: set[tuple[Any, ...]] = set()
        with self.cuda.changed:
            for operation in operations:
                match operation.shape:
                    case ("send", peer):
                        met.add(("to", rank, peer))
                        needed.add(("from", peer, rank))
                    case ("recv", peer):
                        met.add(("from", rank, peer))
                        needed.add(("to", peer, rank))
                    case (kind, *_):
                        met.add((kind, rank))
                        needed |= {(kind, other) for other in range(size)}
            self.cuda.changed.notify_all()
        self.cuda.wait(lambda: needed <= met or self.aborted)
        if self.aborted:
            raise NcclError(2)

    def run(self, number: int, operations: list[Operation]) -> None:
        """A group's kernel."""
        self.cuda.wait(lambda: self.ended == number or self.aborted)
        time.sleep(LATE_SECONDS)
        if not self.aborted:
            with self.cuda.changed:
                for operation in operations:
                    self._begin(operation)
                self.cuda.changed.notify_all()
            self.cuda.wait(lambda: self.aborted or all(o.done for o in operations))
        self.ended += 1
        self.cuda.change()

    def _begin(self, operation: Operation) -> None:
        clique = self.clique
        match operation.shape:
            case ("send", peer):
                clique.sends[self.rank, peer].append(operation)
                self._match(self.rank, peer)
            case ("recv", peer):
                clique.receives[peer, self.rank].append(operation)
                self._match(peer, self.rank)
            case _:
                everyones = clique.collectives[self.collectives]
                self.collectives += 1
                everyones[self.rank] = operation
                if len(everyones) == clique.size:
                    self._collect([everyones[rank] for rank in range(clique.size)])

    def _match(self, source: int, to: int) -> None:
        sends, receives = self.clique.sends[source, to], self.clique.receives[source, to]
        if not sends or not receives or sends[0].count != receives[0].count:
            return
        send, receive = sends.pop(0), receives.pop(0)
        self._at(to, receive.into, receive)[:] = self._at(source, send.source, send)
        self.cuda.moved_bytes += send.count
        send.done = receive.done = True

    def _collect(self, operations: list[Operation]) -> None:
        shape = operations[0].shape
        if any(operation.shape != shape for operation in operations):
            return
        size = len(operations)
        is_scatter, is_gather = shape[0] == "reduceScatter", shape[0] == "allGather"
        reads = size if is_scatter else 1  # a rank's part for each
        rows = [self._at(rank, o.source, o, reads) for rank, o in enumerate(operations)]
        if is_scatter or is_gather:
            whole = _reduce(rows, shape[3]) if is_scatter else np.concatenate(rows)
            for rank, operation in enumerate(operations):
                part = np.split(whole, size)[rank] if is_scatter else whole
                self._at(rank, operation.into, operation, 1 if is_scatter else size)[:] = part
                operation.done = True
            return
        match shape:
            case ("broadcast", _, _, root):
                result, receivers = rows[root].copy(), range(len(operations))
            case ("allreduce", _, _, op):
                result, receivers = _reduce(rows, op), range(len(operations))
            case ("reduce", _, _, op, root):
                result, receivers = _reduce(rows, op), [root]
        for rank in receivers:
            self._at(rank, operations[rank].into, operations[rank])[:] = result
        for operation in operations:
            operation.done = True

    def _at(self, rank: int, address: int, operation: Operation, times: int = 1) -> np.ndarray:
        device = self.clique.members[rank].device
        count = times * operation.count * operation.dtype.itemsize
        return self.cuda.bytes_at(address, count, device).view(operation.dtype)


def _reduce(rows: list[np.ndarray], op: int) -> np.ndarray:
    total = rows[0].copy()
    for row in rows[1:]:
        OPERATORS[op](total, row, out=total)
    return total


def group_start(cuda: Cuda) -> None:
    thread = cuda.thread
    thread.depth = getattr(thread, "depth", 0) + 1
    if thread.depth == 1:
        thread.group = []


def group_end(cuda: Cuda) -> None:
    thread = cuda.thread
    thread.depth -= 1
    if thread.depth:
        return
    by_communicator: dict[int, list[tuple[Communicator, Stream, Operation]]] = defaultdict(list)
    for entry in thread.group:
        by_communicator[id(entry[0])].append(entry)
    for entries in by_communicator.values():
        communicator, stream, _ = entries[0]
        operations = [operation for _, _, operation in entries]
        communicator.meet(operations)
        if stream.device != communicator.device:
            cuda.report_misuse(
                f"GPU {communicator.device}'s kernel ran on a stream of {stream.device}"
            )
        number, communicator.begun = communicator.begun, communicator.begun + 1
        stream.tasks.put(lambda c=communicator, n=number, o=operations: c.run(n, o))


def install(monkeypatch: Any, cuda: Cuda) -> None:
    """Make `import cupy` return this machine."""
    for name, module in cuda.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@contextmanager
def with_kernels(monkeypatch: Any, library: Any, gpus: int = 8) -> Iterator[Cuda]:
    """A machine that runs the library's kernels, compiled for the host; no misuse is allowed."""
    caches = (cuda_machine.cupy, cuda_machine._load)
    for cache in caches:
        cache.cache_clear()
    cuda = Cuda(gpus)
    cuda.library = library
    install(monkeypatch, cuda)
    try:
        yield cuda
    finally:
        cuda.off.set()
        cuda.change()
        for cache in caches:
            cache.cache_clear()
    assert cuda.misuses == []
