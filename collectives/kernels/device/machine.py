"""Machine: the interface to a GPU. CudaMachine (cuda.py) implements it.

The tests have another implementation, which runs the same kernels on the host, on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...vector import Array, Located


class Machine(Protocol):
    """One device and one stream on it: launches run one after the other."""

    threads: int  # of every block
    blocks: int  # the most to launch: a grid-stride loop needs no more to fill the device

    def empty(self, size: int, dtype: Any) -> Array:
        """Return uninitialized device memory."""

    def zeros(self, size: int, dtype: Any) -> Array:
        """Return zeroed device memory."""

    def put(self, array: NDArray[Any]) -> Array:
        """Return a copy of a host array in device memory."""

    def write(self, array: Array, content: NDArray[Any]) -> None:
        """Enqueue a copy of a small host array to device memory; `content` may change at once."""

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Record the launches, without running them; return a function that runs them.

        The launches' arguments (addresses and numbers) are fixed now. The kernels must have been
        launched before, and `launches` must not allocate memory.
        """

    def packed(self, array: Array) -> Array:
        """Return the array, or a contiguous copy."""

    def address(self, array: Array) -> int:
        """Return the device address of an array's data."""

    def launch(self, kernel: str, blocks: int, *arguments: Array | np.generic | None) -> None:
        """Enqueue a kernel, by its name with template arguments; None is a null pointer."""

    def fetch(self, array: Array) -> NDArray[Any]:
        """Return a copy on the host; waits for everything launched before."""


def require_packed(*arguments: Array | np.generic | None) -> None:
    """Raise ValueError for an array that is not contiguous: kernels ignore strides."""
    for array in arguments:
        if not (array is None or isinstance(array, np.generic) or array.flags.c_contiguous):
            raise ValueError(
                "kernels need contiguous arrays, got strides "
                f"{array.strides} for {array.dtype} {list(array.shape)}; copy it first"
            )


def blocks_for(machine: Machine, work: int, each: int = 1) -> int:
    """Return how many blocks to launch if a thread takes `each` units of work at a time."""
    return max(1, min(machine.blocks, ceil_divide(work, machine.threads * each)))


def ceil_divide(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


class Scratch:
    """Named device memory of one machine that is reused from call to call and only grows.

    A CUDA graph fixes addresses, so it needs a Scratch of its own.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrays: dict[str, Array] = {}
        self._written: dict[str, bytes] = {}

    def array(self, name: str, size: int, dtype: Any) -> Array:
        """Return the first `size` elements of the memory of that name and dtype; new ones are 0."""
        dtype = np.dtype(dtype)
        key = f"{name} {dtype}"
        memory = self.arrays.get(key)
        if memory is None or memory.size < size:
            # Zeros: kernels expect tickets and sums to be zero, and leave them so. At least one
            # element, as it needs an address.
            memory = self.arrays[key] = self.machine.zeros(max(size, 1), dtype)
        return memory[:size]

    def written(self, name: str, content: NDArray[Any]) -> Array:
        """Return memory of that name with a host array's content, copied only if it changed."""
        array = self.array(name, content.size, content.dtype)
        content_bytes = content.tobytes()
        # Most steps need the same bytes, and comparing them is cheaper than a copy to the device.
        if self._written.get(name) != content_bytes:
            self.machine.write(array, content)
            self._written[name] = content_bytes
        return array


def located(machine: Machine, parts: Sequence[Array] | Located) -> tuple[Located, Sequence[Array]]:
    """Return the parts' addresses, and the arrays or contiguous copies to keep alive for them."""
    if isinstance(parts, Located):
        return parts, ()
    parts = [machine.packed(part) for part in parts]
    addresses = tuple(machine.address(part) for part in parts)
    return Located(parts[0].dtype, addresses, tuple(part.size for part in parts)), parts


def parts_table(scratch: Scratch, name: str, parts: Located) -> Array:
    """Return each part's start in the vector, and its address: uint64 [2 * parts].

    In scratch memory of that name, and copied to the device only if it changed.
    """
    starts = accumulate(parts.sizes, initial=0)
    table = [number for pair in zip(starts, parts.addresses, strict=False) for number in pair]
    return scratch.written(name, np.array(table, np.uint64))
