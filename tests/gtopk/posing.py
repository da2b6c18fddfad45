"""Host memory that poses as a GPU's: its arrays are not NumPy's, and it uses the CUDA kernels.

The kernels are compiled for the host. Tensors stay on torch's CPU, but report a GPU as their
device. Asynchronous execution is not modelled.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives.kernels.device import cuda
from collectives.kernels.device.machine import Scratch
from gtopk.exchange import bucket_exchange, residual
from gtopk.exchange.buckets import arrays, buckets
from tests.collectives.kernels.device.machine_on_host import HostMachine, build

WHOLE = ("dtype", "size", "nbytes", "itemsize", "shape", "strides", "flags", "ndim")


class Posing:
    """A GPU array with the methods of CuPy's that the library uses."""

    __module__ = "posing"  # where `module_of` finds `asarray`
    device = nullcontext()
    __cuda_array_interface__ = None  # the library identifies GPU arrays with this

    def __init__(self, content: np.ndarray) -> None:
        self.content = content

    def __getattr__(self, name: str) -> Any:
        if name in WHOLE:
            return getattr(self.content, name)
        raise AttributeError(name)

    def get(self) -> np.ndarray:
        """Copy to the host, and count the bytes."""
        moved["to the host"] += self.content.nbytes
        return self.content.copy()

    def __getitem__(self, at: Any) -> Posing:
        return Posing(self.content[plain(at)])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.content[plain(at)] = plain(value)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def view(self, dtype: Any) -> Posing:
        return Posing(self.content.view(dtype))

    def fill(self, value: float) -> None:
        self.content.fill(value)

    def __abs__(self) -> Posing:
        return Posing(abs(self.content))

    def __truediv__(self, other: float) -> Posing:
        return Posing(self.content / self.content.dtype.type(other))

    def __lt__(self, other: Posing) -> Posing:
        return Posing(self.content < other.content)

    def __ne__(self, other: Posing) -> Posing:  # type: ignore[override]
        return Posing(self.content != other.content)

    def __sub__(self, other: Posing) -> Posing:
        return Posing(self.content - other.content)


one_at_a_time = threading.Lock()  # the compiled kernels have one grid
moved: Counter[str] = Counter()  # bytes, to the host and from it


def plain(array: Any) -> Any:
    return array.content if isinstance(array, Posing) else array


def asarray(array: Any) -> Posing:
    """Replace cupy.asarray; the library finds it through the class's module."""
    if isinstance(array, Posing):
        return array
    moved["from the host"] += array.nbytes
    return Posing(array.copy())


def flatnonzero(array: Posing) -> Posing:
    """Replace cupy.flatnonzero, likewise."""
    return Posing(np.flatnonzero(array.content))


class PosingMachine(HostMachine):
    """The machine of the kernels' tests, on posing arrays."""

    def empty(self, size: int, dtype: Any) -> Any:
        return Posing(super().empty(size, dtype))

    def zeros(self, size: int, dtype: Any) -> Any:
        array = self.empty(size, dtype)
        array.content.view(np.uint8)[:] = 0
        return array

    def put(self, array: np.ndarray) -> Any:
        copy = self.empty(array.size, array.dtype)
        copy.content[:] = array
        return copy

    def packed(self, array: Any) -> Any:
        return Posing(np.ascontiguousarray(array.content))

    def address(self, array: Any) -> int:
        return array.content.ctypes.data

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        with one_at_a_time:
            super().launch(kernel, blocks, *map(plain, arguments))

    def fetch(self, array: Any) -> np.ndarray:
        return super().fetch(array.content)


def compile_kernels(folder: Path) -> Any:
    """Return the CUDA kernels, compiled for the host."""
    return build(folder, 64)


def pose(monkeypatch: pytest.MonkeyPatch, library: Any) -> Callable[[], list[str]]:
    """Put all parameters of this process on a GPU; return a function that lists the kernels run.

    Each thread has its own machine, as the work of threads is not ordered.
    """
    moved.clear()
    machines: list[PosingMachine] = []

    @functools.cache
    def scratch_of(thread: int) -> Scratch:
        machines.append(PosingMachine(library, 64, 5))
        return Scratch(machines[-1])

    monkeypatch.setattr(cuda, "scratch", lambda array: scratch_of(threading.get_ident()))

    def view(tensor: torch.Tensor) -> Posing:
        return Posing(arrays.view_array(tensor))

    monkeypatch.setattr(buckets, "view_array", view)
    monkeypatch.setattr(
        arrays.Memory, "of", classmethod(lambda cls, tensor: cls(tensor, view(tensor)))
    )
    for module in (buckets, residual):
        monkeypatch.setattr(module, "view_tensor", lambda array: arrays.view_tensor(array.content))
    monkeypatch.setattr(buckets, "_on_gpu", lambda device: True)
    monkeypatch.setattr(bucket_exchange.BucketExchange, "checks_finite_first", False)
    monkeypatch.setitem(sys.modules, "posing", sys.modules[__name__])
    return lambda: [kernel for machine in machines for kernel in machine.launched]
