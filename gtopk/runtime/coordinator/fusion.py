"""Fusion: small dense arrays that are ready at the same time are reduced as one.

    engine.submit(name, signature, work, fusion=[Dense(array)])

An operation that is submitted with dense arrays has them reduced by the engine, in their own
memory, before `work` is called: alone, or copied into one buffer with arrays of other operations
that became ready in the same cycle and have the same key. `work(transport, all_flags)` does what is
left (an integer's division, say); its result is the operation's. Several arrays in one operation
are a group: all are reduced, or none.

Such an operation needs no join descriptor: a rank that has joined takes part with the neutral
element (zeros in a sum). The engine checks dtype, length, reduction and factors across ranks, after
the operation's own signature.

    arrays, in the order all ranks agree on     reduced
    a  float32 sum   1 KB                       a c   in the buffer
    b  float32 sum   4 MB                       b     alone, in its own memory
    c  float32 sum   2 KB                       d     alone: no other has its key
    d  float64 sum   1 KB

Tensors on a GPU (`OnGpu`) are reduced there where every rank has its own on one, as the flags say;
else through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.kernels.narrow import BFLOAT16, is_narrow, narrow, widen
from collectives.transports import Transport

from .on_gpu import OnGpu, on_place, reduce_as_one

# Hears when a part of a reduction begins and ends.
Notice = Callable[[Literal["begin", "end"], Literal["copy-in", "reduce", "copy-out"]], None]

_BFLOAT16: Final = "bfloat16"


class Dense(NamedTuple):
    """An array that is reduced over the ranks in place.

    array:     on the host, or `OnGpu`; one-dimensional, contiguous, writable; nobody else may touch
               it until the operation is done.
    reduction: "sum", "product", "min" or "max".
    prescale:  factor before the reduction, postscale: after it. Integers are scaled in float64 and
               truncated, 16-bit floats in float32.
    """

    array: NDArray[Any] | OnGpu
    reduction: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def on_host(self) -> NDArray[Any]:
        """The array, where it is known to be on the host."""
        assert isinstance(self.array, np.ndarray)
        return self.array


class Layout(NamedTuple):
    """All of a dense array but its values: equal on all ranks; its dtype by name."""

    dtype: str
    length: int
    reduction: str
    prescale: float
    postscale: float

    def describe(self) -> str:
        return (
            f"{self.dtype} [{self.length}] {self.reduction} "
            f"prescale_factor={self.prescale} postscale_factor={self.postscale}"
        )


def layout_of(dense: Dense) -> Layout:
    """Return the layout of an array; raise ValueError for one that cannot be reduced in place."""
    array = dense.array
    if isinstance(array, OnGpu):
        name = str(array.tensor.dtype).removeprefix("torch.")
        factors = float(dense.prescale), float(dense.postscale)
        return Layout(name, array.tensor.numel(), dense.reduction, *factors)
    if (
        not (array.dtype.kind in "iuf" or is_narrow(array.dtype))
        or array.ndim != 1
        or not array.flags.c_contiguous
        or not array.flags.writeable
    ):
        raise ValueError(
            "a dense array must be of integers or floats, one-dimensional, contiguous and "
            f"writable, got {array.dtype} {list(array.shape)} with strides {array.strides}"
        )
    name = _BFLOAT16 if array.dtype == BFLOAT16 else array.dtype.name
    return Layout(name, array.size, dense.reduction, float(dense.prescale), float(dense.postscale))


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype that a layout's name stands for."""
    return BFLOAT16 if name == _BFLOAT16 else np.dtype(name)


def neutral(layout: Layout, place: str = "") -> Dense:
    """Return the array that changes nothing in the reduction.

    place: of the tensor that it is on a GPU; "": it is on the host.
    """
    dtype = dtype_named(layout.dtype)
    wide = widen(np.empty(0, dtype)).dtype
    limits = np.finfo(wide) if wide.kind == "f" else np.iinfo(wide)
    infinity = np.inf if wide.kind == "f" else None
    element = {
        "sum": 0,
        "product": 1,
        "min": infinity or limits.max,
        "max": -infinity if infinity else limits.min,
    }[layout.reduction]
    array = narrow(np.full(layout.length, element, wide), dtype)
    return Dense(on_place(array, place, layout.dtype) if place else array, layout.reduction)


class Share(NamedTuple):
    """An array of an operation that is ready: which one of which operation, by their numbers.

    on_gpu: whether it is reduced there.
    """

    of: int
    place: int
    layout: Layout
    on_gpu: bool = False


def bundle(shares: Iterable[Share], threshold_bytes: int, alone_bytes: int) -> list[list[Share]]:
    """Return which arrays are reduced as one, by the order of the first in each.

    threshold_bytes: the most that are reduced as one. alone_bytes: of an array that gains less by
    company than the copies to the buffer and back take.
    The same on every rank that has the same layouts in the same order.
    """
    bundles: list[list[Share]] = []
    growing: dict[object, tuple[list[Share], int]] = {}
    for share in shares:
        dtype, length, *rest = share.layout
        size = length * dtype_named(dtype).itemsize
        if size >= alone_bytes or size > threshold_bytes:
            bundles.append([share])
            continue
        key = dtype, share.on_gpu, *rest
        members, held = growing.get(key, ([], 0))
        if not members or held + size > threshold_bytes:
            members, held = [], 0
            bundles.append(members)
        members.append(share)
        growing[key] = members, held + size
    return bundles


def scale(array: NDArray[Any], factor: float) -> None:
    """Multiply in place; integers in float64, truncated; 16-bit floats in float32."""
    if factor == 1.0:
        return
    if is_narrow(array.dtype):
        array[...] = narrow(widen(array) * np.float32(factor), array.dtype)
    elif array.dtype.kind != "f":
        array[...] = np.trunc(array * np.float64(factor))
    else:
        array *= array.dtype.type(factor)


class Fuser:
    """Reduces arrays as one; keeps the buffer for the next ones."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def reduce(
        self,
        members: Sequence[Dense],
        layout: Layout,
        transport: Transport,
        notice: Notice,
        on_gpu: bool = False,
    ) -> None:
        """Reduce arrays with one key over the ranks; each changes in its own memory.

        layout: of any of them.
        on_gpu: whether they are reduced there; all of them are `OnGpu` then.
        """
        if on_gpu:
            tensors = [(d.array, d.prescale) for d in members if isinstance(d.array, OnGpu)]
            notice("begin", "reduce")
            reduce_as_one(tensors, layout.postscale, layout.reduction, transport)
            notice("end", "reduce")
            return
        arrays = [
            dense.array.on_host() if isinstance(dense.array, OnGpu) else dense.array
            for dense in members
        ]
        for dense, array in zip(members, arrays, strict=True):
            scale(array, dense.prescale)
        self._reduce_on_host(arrays, layout, transport, notice)
        for dense, array in zip(members, arrays, strict=True):
            if isinstance(dense.array, OnGpu):
                dense.array.write(array)

    def _reduce_on_host(
        self,
        arrays: Sequence[NDArray[Any]],
        layout: Layout,
        transport: Transport,
        notice: Notice,
    ) -> None:
        if len(arrays) == 1:
            _reduce(arrays[0], layout, transport, notice)
            return
        notice("begin", "copy-in")
        size_bytes = sum(array.nbytes for array in arrays)
        buffer = self._take(size_bytes).view(dtype_named(layout.dtype))
        np.concatenate(arrays, out=buffer)
        notice("end", "copy-in")
        _reduce(buffer, layout, transport, notice)
        notice("begin", "copy-out")
        start = 0
        for array in arrays:
            end = start + array.size
            array[...] = buffer[start:end]
            start = end
        notice("end", "copy-out")

    def _take(self, size_bytes: int) -> NDArray[np.uint8]:
        if self._buffer.size < size_bytes:
            self._buffer = np.empty(size_bytes, np.uint8)
        return self._buffer[:size_bytes]


def _reduce(array: NDArray[Any], layout: Layout, transport: Transport, notice: Notice) -> None:
    notice("begin", "reduce")
    transport.allreduce(array, layout.reduction)
    scale(array, layout.postscale)
    notice("end", "reduce")
