"""CudaMachine: a Machine through CuPy. The only file here that imports CuPy, at first use."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...vector import Array
from .machine import Scratch, require_packed
from .source import FILES, OPTIONS, THREADS, text

# Two full waves of `mark`, the busiest kernel, of which four blocks fit on a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR: Final = 8

_thread_local: Final = threading.local()


@functools.cache
def cupy() -> Any:
    """Return CuPy, or raise ImportError that says how to install it."""
    try:
        return import_module("cupy")
    except ImportError as error:
        raise ImportError(
            "arrays on a GPU need cupy: pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
        ) from error


class CudaMachine:
    """CuPy's current device and stream; see `Machine` for the methods."""

    threads = THREADS

    def __init__(self) -> None:
        self.device = cupy().cuda.Device()
        self.blocks = BLOCKS_PER_MULTIPROCESSOR * self.device.attributes["MultiProcessorCount"]

    def empty(self, size: int, dtype: Any) -> Array:
        """Return memory from CuPy's pool."""
        return cupy().empty(size, dtype)

    def zeros(self, size: int, dtype: Any) -> Array:
        """Return zeroed memory from CuPy's pool."""
        return cupy().zeros(size, dtype)

    def put(self, array: NDArray[Any]) -> Array:
        """Return a copy of a host array, in memory from CuPy's pool."""
        return cupy().asarray(array)

    def write(self, array: Array, content: NDArray[Any]) -> None:
        """Enqueue a copy from pageable memory, which CUDA has read when this returns."""
        array.set(content)  # type: ignore[attr-defined]

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays the launches as a CUDA graph, on the then current stream.

        They are captured on a new stream: the default stream cannot be captured, and other threads
        may use any other.
        """
        with cupy().cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                launches()
            finally:
                # Even after an error: otherwise the stream would go on capturing.
                graph = stream.end_capture()
        return lambda: graph.launch(cupy().cuda.get_current_stream())

    def packed(self, array: Array) -> Array:
        """Return the array, or a contiguous copy."""
        return cupy().ascontiguousarray(array)

    def address(self, array: Array) -> int:
        """Return the device pointer."""
        return int(array.data.ptr)  # type: ignore[attr-defined]

    def launch(self, kernel: str, blocks: int, *arguments: Array | np.generic | None) -> None:
        """Enqueue a kernel on the current stream."""
        require_packed(*arguments)
        null = np.uint64(0)  # CuPy refuses None as a pointer
        converted = tuple(null if argument is None else argument for argument in arguments)
        _load(self.device.id, kernel)((blocks,), (self.threads,), converted)

    def fetch(self, array: Array) -> NDArray[Any]:
        """Return a copy on the host; waits for the current stream only."""
        return cupy().asnumpy(array)


@functools.cache
def _load(device: int, kernel: str) -> Any:
    """Return a kernel for the current device; CuPy caches compiled kernels on disk."""
    source = text(FILES[kernel.partition("<")[0]])
    module = cupy().RawModule(code=source, options=OPTIONS, name_expressions=(kernel,))
    return module.get_function(kernel)


def scratch(array: Array) -> Scratch:
    """Return the scratch memory of this thread on the current stream of the array's device."""
    device = cupy().cuda.Device()
    array_gpu = array.device.id  # type: ignore[attr-defined]
    if array_gpu != device.id:
        raise ValueError(
            f"the array is on GPU {array_gpu}, but GPU {device.id} is the current one; "
            f"use it inside `with cupy.cuda.Device({array_gpu}):`"
        )
    return current_scratch()


def current_scratch() -> Scratch:
    """Return the scratch memory of this thread on the current stream of the current device."""
    scratches: dict[tuple[int, int], Scratch] = _thread_local.__dict__.setdefault("scratch", {})
    # By stream, since kernels on two streams could write to it at the same time.
    key = (cupy().cuda.Device().id, cupy().cuda.get_current_stream().ptr)
    if key not in scratches:
        scratches[key] = Scratch(CudaMachine())
    return scratches[key]


class ForeignStream(NamedTuple):
    """Another library's stream, for CuPy, by the CUDA stream protocol (version 0)."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@contextmanager
def on_stream(pointer: int, device: int, make_room: Callable[[], object]) -> Iterator[None]:
    """Run CuPy's work in the context on another library's stream; pointer: the stream's address.

    make_room: called if CuPy's pool runs out of memory, before a second try, to make that library
        free unused memory.
    """
    cuda = cupy().cuda
    allocate = cuda.get_allocator()

    def allocate_or_make_room(size: int) -> Any:
        try:
            return allocate(size)
        except cuda.memory.OutOfMemoryError:
            make_room()
            return allocate(size)

    with (
        cuda.Device(device),
        cuda.Stream.from_external(ForeignStream(pointer)),
        cuda.using_allocator(allocate_or_make_room),  # in this thread only
    ):
        yield


def from_dlpack(tensor: Any) -> Array:
    """Return another library's device array as a CuPy array of the same memory.

    The protocol orders the streams with an event: work that the other library has enqueued comes
    before later work on CuPy's current stream.
    """
    return cupy().from_dlpack(tensor)
