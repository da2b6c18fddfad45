"""Machine: the interface of a GPU for the launch sequences.

CUDA is one machine (cuda.py). The tests have another, which runs the same kernels on the host, on
NumPy arrays.
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
    blocks: int  # that the device runs at once, about

    def empty(self, size: int, dtype: Any) -> Array:
        """Return device memory without setting it."""

    def zeros(self, size: int, dtype: Any) -> Array:
        """Return device memory, all zero bytes."""

    def put(self, array: NDArray[Any]) -> Array:
        """Return a copy of a host array in device memory."""

    def write(self, array: Array, content: NDArray[Any]) -> None:
        """Enqueue a copy of a small host array to device memory; it is free again at once."""

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Record the launches, without running them; return a function that runs them.

        Addresses and numbers among the arguments are fixed now. The kernels must have been launched
        before, and `launches` must not allocate memory.
        """

    def packed(self, array: Array) -> Array:
        """Return the array, or a copy where its elements lie apart."""

    def address(self, array: Array) -> int:
        """Return the device address of an array's data."""

    def launch(self, kernel: str, blocks: int, *arguments: Array | np.generic | None) -> None:
        """Enqueue a kernel, by its name with template arguments; None is a null pointer."""

    def fetch(self, array: Array) -> NDArray[Any]:
        """Return a copy on the host: waits for all that was launched."""


def require_packed(*arguments: Array | np.generic | None) -> None:
    """Raise ValueError for an array whose elements lie apart: kernels count from its beginning."""
    for array in arguments:
        if not (array is None or isinstance(array, np.generic) or array.flags.c_contiguous):
            raise ValueError(
                "kernels work on arrays whose elements lie side by side, got strides "
                f"{array.strides} for {array.dtype} {list(array.shape)}; copy it first"
            )


def blocks_for(machine: Machine, work: int, each: int = 1) -> int:
    """Return how many blocks to launch where a thread does `each` units of work, strided."""
    return max(1, min(machine.blocks, ceil_divide(work, machine.threads * each)))


def ceil_divide(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


class Scratch:
    """Named device memory of one machine that outlives a call and only grows.

    A CUDA graph keeps the addresses it was captured with: capture with a Scratch of its own.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrays: dict[str, Array] = {}
        self._written: dict[str, bytes] = {}

    def array(self, name: str, size: int, dtype: Any) -> Array:
        """Return `size` elements of the memory of that name and dtype; zeros where it grew."""
        dtype = np.dtype(dtype)
        key = f"{name} {dtype}"
        held = self.arrays.get(key)
        if held is None or held.size < size:
            # Zeros, as kernels leave their tickets and sums at zero and expect to find them so; and
            # at least one element, so that there is an address.
            held = self.arrays[key] = self.machine.zeros(max(size, 1), dtype)
        return held[:size]

    def written(self, name: str, content: NDArray[Any]) -> Array:
        """Return memory of that name with a host array in it, which is sent only if it changed."""
        array = self.array(name, content.size, content.dtype)
        content_bytes = content.tobytes()
        # Most steps send the same bytes: to compare them here is cheaper than a copy to the device.
        if self._written.get(name) != content_bytes:
            self.machine.write(array, content)
            self._written[name] = content_bytes
        return array


def located(machine: Machine, parts: Sequence[Array] | Located) -> tuple[Located, Sequence[Array]]:
    """Return where the parts lie, and the arrays that must stay alive for it, copies among them."""
    if isinstance(parts, Located):
        return parts, ()
    parts = [machine.packed(part) for part in parts]
    addresses = tuple(machine.address(part) for part in parts)
    return Located(parts[0].dtype, addresses, tuple(part.size for part in parts)), parts


def parts_table(scratch: Scratch, name: str, parts: Located) -> Array:
    """Return where each part begins in the vector, and its address: uint64 [2 * parts].

    In scratch memory of that name; sent to the device only where it is not what it was.
    """
    starts = accumulate(parts.sizes, initial=0)
    table = [number for pair in zip(starts, parts.addresses, strict=False) for number in pair]
    return scratch.written(name, np.array(table, np.uint64))
