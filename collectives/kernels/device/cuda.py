"""The CUDA machine, through CuPy: the one file here that imports it, at first use."""

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

# Two full waves of the busiest kernel: four blocks of `mark` have room on a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR: Final = 8

_mine: Final = threading.local()


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
    """CuPy's current device and stream."""

    threads = THREADS

    def __init__(self) -> None:
        self.device = cupy().cuda.Device()
        self.blocks = BLOCKS_PER_MULTIPROCESSOR * self.device.attributes["MultiProcessorCount"]

    def empty(self, size: int, dtype: Any) -> Array:
        """Return memory from CuPy's pool."""
        return cupy().empty(size, dtype)

    def zeros(self, size: int, dtype: Any) -> Array:
        """Return memory from CuPy's pool, all zero bytes."""
        return cupy().zeros(size, dtype)

    def put(self, array: NDArray[Any]) -> Array:
        """Return a copy of a host array in memory from CuPy's pool."""
        return cupy().asarray(array)

    def write(self, array: Array, content: NDArray[Any]) -> None:
        """Enqueue a copy from pageable memory, which CUDA stages before it returns."""
        array.set(content)  # type: ignore[attr-defined]

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays a CUDA graph of the launches on the then current stream.

        They are captured on a stream of their own: the default stream cannot be captured, and
        another may have work of other threads on it.
        """
        with cupy().cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                launches()
            finally:
                # After an error, too: until then CUDA would capture whatever comes on this stream.
                graph = stream.end_capture()
        return lambda: graph.launch(cupy().cuda.get_current_stream())

    def packed(self, array: Array) -> Array:
        """Return the array, or a copy where its elements lie apart."""
        return cupy().ascontiguousarray(array)

    def address(self, array: Array) -> int:
        """Return the device pointer."""
        return int(array.data.ptr)  # type: ignore[attr-defined]

    def launch(self, kernel: str, blocks: int, *arguments: Array | np.generic | None) -> None:
        """Enqueue a kernel on the current stream."""
        require_packed(*arguments)
        # CuPy takes no None for a pointer.
        null = np.uint64(0)
        given = tuple(null if argument is None else argument for argument in arguments)
        _load(self.device.id, kernel)((blocks,), (self.threads,), given)

    def fetch(self, array: Array) -> NDArray[Any]:
        """Return a copy on the host; waits for the current stream only."""
        return cupy().asnumpy(array)


@functools.cache
def _load(device: int, kernel: str) -> Any:
    """Return a kernel for the current device; CuPy keeps what it compiled on disk."""
    source = text(FILES[kernel.partition("<")[0]])
    module = cupy().RawModule(code=source, options=OPTIONS, name_expressions=(kernel,))
    return module.get_function(kernel)


def scratch(array: Array) -> Scratch:
    """Return the scratch memory of this thread on the current stream of the array's device."""
    device = cupy().cuda.Device()
    holder = array.device.id  # type: ignore[attr-defined]
    if holder != device.id:
        raise ValueError(
            f"the array is on GPU {holder} while GPU {device.id} is the current one; "
            f"use it inside `with cupy.cuda.Device({holder}):`"
        )
    return current_scratch()


def current_scratch() -> Scratch:
    """Return the scratch memory of this thread on the current stream of the current device."""
    held: dict[tuple[int, int], Scratch] = _mine.__dict__.setdefault("scratch", {})
    # Of this thread and stream alone: kernels of two streams could write it at the same time.
    key = (cupy().cuda.Device().id, cupy().cuda.get_current_stream().ptr)
    if key not in held:
        held[key] = Scratch(CudaMachine())
    return held[key]


class ForeignStream(NamedTuple):
    """Another library's stream, to CuPy: the CUDA stream protocol's version and the address."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@contextmanager
def on_stream(pointer: int, device: int, make_room: Callable[[], object]) -> Iterator[None]:
    """Run everything in the context on another library's stream; pointer: the stream's address.

    make_room: makes that library free unused memory; called where there is too little for CuPy's
        pool, before a second try.
    """
    cuda = cupy().cuda
    allocate = cuda.get_allocator()

    def allocate_patiently(size: int) -> Any:
        try:
            return allocate(size)
        except cuda.memory.OutOfMemoryError:
            make_room()
            return allocate(size)

    with (
        cuda.Device(device),
        cuda.Stream.from_external(ForeignStream(pointer)),
        cuda.using_allocator(allocate_patiently),  # in this thread only
    ):
        yield


def from_dlpack(tensor: Any) -> Array:
    """Return another library's device array as CuPy's, in the same memory.

    Work of that library on its current stream comes before later work of the current stream here:
    the protocol orders them with an event.
    """
    return cupy().from_dlpack(tensor)
