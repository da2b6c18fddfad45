"""Fusion: small dense arrays that are ready at the same time are reduced as one.

    engine.submit(name, signature, work, fusion=[Dense(array)])

The engine reduces an operation's dense arrays, in their own memory, before it calls `work`: alone,
or copied into one buffer with arrays of other operations that became ready in the same cycle and
have the same key. `work(transport, all_flags)` does the rest (an integer's division, say); its
result is the operation's. Several arrays in one operation are a group: all are reduced, or none.

Such an operation needs no join descriptor: a rank that has joined takes part with the neutral
element (zeros in a sum). The engine checks dtype, length, reduction and factors across ranks, after
the operation's own signature.

    arrays, in the order all ranks agree on     reduced
    a  float32 sum   1 KB                       a c   in the buffer
    b  float32 sum   4 MB                       b     alone, in its own memory
    c  float32 sum   2 KB                       d     alone: no other has its key
    d  float64 sum   1 KB

Tensors on a GPU (`DeferredGpuArray`) are reduced there if every rank has its tensor on a GPU, as
the flags say; else through the host. The engine's thread works on a CUDA stream of its own:

    submitter's stream   ... make the tensor | event                           | wait | use it
                                             v                                 ^
    engine's stream                            wait | scale, fuse, NCCL, scale | event

So it does not wait for what backward does on the submitter's stream after that event. Tensors on
the host, as in tests, have no streams and no events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.kernels.narrow import BFLOAT16, is_narrow, multiply, narrow, widen
from collectives.transports import Transport
from collectives.transports.gpu import host_copy, tensor_of

# Flags of operations that may be done on a GPU; a rank that has joined has 0.
ON_HOST, ON_GPU = 1, 2

# Streams of a thread's own: each process set has an engine, and so a thread, of its own.
_own: Final = threading.local()

Event = Any  # torch.cuda.Event, or None on the host


@dataclass(frozen=True)
class DeferredGpuArray:
    """A flat, contiguous tensor that is worked on where it lies.

    made: the event after which it has its values, recorded by the thread that submits it.
    """

    tensor: torch.Tensor
    made: Event

    @classmethod
    def now(cls, tensor: torch.Tensor) -> DeferredGpuArray:
        """Wrap a tensor whose values the work given to the current stream so far produces."""
        return cls(tensor, record_event(tensor.device))

    def on_host(self) -> NDArray[Any]:
        """Return a copy on the host, once it has its values; bfloat16 as BFLOAT16."""
        with on_own_stream(self.tensor.device, [self.made]):
            return host_copy(self.tensor)

    def bytes_on_host(self) -> NDArray[np.uint8]:
        """Return the bytes on the host, uint8 [bytes]; call it where the values are ready."""
        return host_copy(self.tensor.view(torch.uint8))

    def write(self, array: NDArray[Any]) -> None:
        """Copy an array as `on_host` returns it into the tensor."""
        # No event to wait for: `on_host`, before it, has waited for the values.
        with on_own_stream(self.tensor.device):
            self.tensor.copy_(tensor_of(array, self.tensor))


def all_on_gpu(all_flags: Sequence[int]) -> bool:
    """Tell whether every rank that takes part has its tensors on a GPU."""
    those = {flags for flags in all_flags if flags}
    return those == {ON_GPU}


def record_event(device: torch.device) -> Event:
    """Return an event after which a device's current stream has done its work so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def on_own_stream(device: torch.device, events: Sequence[Event] = ()) -> Iterator[None]:
    """Work on this thread's own stream of a device, after these events."""
    if device.type != "cuda":
        yield
        return
    streams: dict[int, torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    index = device.index or 0
    # Around both: at its end torch.cuda.stream alone would open a context on GPU 0.
    with torch.cuda.device(index):
        if index not in streams:
            streams[index] = torch.cuda.Stream(index)
        stream = streams[index]
        for each in events:
            if each is not None:
                stream.wait_event(each)
        with torch.cuda.stream(stream):
            yield


class Finish:
    """The end of an operation's work on a GPU: `on` records it, `wait` waits for it, if any."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._end: Event = None

    @contextmanager
    def on(self, device: torch.device, made: Sequence[Event] = ()) -> Iterator[None]:
        """Work on this thread's own stream of a device, after `made`; record the end."""
        with on_own_stream(device, made):
            yield
            # Within the context, so that the event is on this thread's own stream.
            self._device, self._end = device, record_event(device)

    def wait(self, results: Iterable[Any] = ()) -> None:
        """Make the current stream wait for the end; the host does not wait.

        results: the operation's, of which tensors are recorded on the current stream. Their memory
            belongs to the stream that made them: torch would reuse it while this one still reads.
        """
        if self._end is None:
            return
        here = torch.cuda.current_stream(self._device)
        here.wait_event(self._end)
        for result in results:
            if getattr(result, "is_cuda", False):
                result.record_stream(here)


def scale_tensor(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, truncated; 16-bit floats in float32."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc())


def reduce_as_one(
    members: Sequence[tuple[DeferredGpuArray, float]],
    postscale: float,
    reduction: str,
    transport: Transport,
) -> None:
    """Reduce tensors of one dtype over the ranks, each in its own memory.

    members: tensors, each with the factor before the reduction; postscale: the factor after it.
    """
    tensors = [each.tensor for each, _ in members]
    prescales = {prescale for _, prescale in members}
    with on_own_stream(tensors[0].device, [each.made for each, _ in members]):
        if len(prescales) > 1:  # one stands in for a rank that has joined
            for tensor, (_, prescale) in zip(tensors, members, strict=True):
                scale_tensor(tensor, prescale)
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if len(prescales) == 1:
            scale_tensor(whole, *prescales)
        transport.allreduce(whole, reduction)  # type: ignore[arg-type]
        scale_tensor(whole, postscale)
        if len(tensors) > 1:
            parts = whole.split([tensor.numel() for tensor in tensors])
            # One launch for all of them, not one for each.
            torch._foreach_copy_(tensors, list(parts))


# Called when a part of a reduction begins and ends.
Notice = Callable[[Literal["begin", "end"], Literal["copy-in", "reduce", "copy-out"]], None]

_BFLOAT16: Final = "bfloat16"


class Dense(NamedTuple):
    """An array that is reduced over the ranks in place.

    array:     on the host, or `DeferredGpuArray`; one-dimensional, contiguous, writable; nothing
               else may read or write it until the operation is done.
    reduction: "sum", "product", "min" or "max".
    prescale:  factor before the reduction, postscale: after it. Integers are scaled in float64 and
               truncated, 16-bit floats in float32.
    """

    array: NDArray[Any] | DeferredGpuArray
    reduction: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def on_host(self) -> NDArray[Any]:
        """The array; asserts that it is on the host."""
        assert isinstance(self.array, np.ndarray)
        return self.array


class Layout(NamedTuple):
    """A dense array's description, without its values: equal on all ranks; the dtype by name."""

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
    # Layouts are announced by msgpack, which takes no scalars of NumPy.
    factors = float(dense.prescale), float(dense.postscale)
    if isinstance(array, DeferredGpuArray):
        name = str(array.tensor.dtype).removeprefix("torch.")
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
    return Layout(name, array.size, dense.reduction, *factors)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype that a layout's name stands for."""
    return BFLOAT16 if name == _BFLOAT16 else np.dtype(name)


def neutral_array(layout: Layout, place: str = "") -> Dense:
    """Return an array of the reduction's neutral element.

    place: the device of the tensor that it is made as; "": it is an array on the host.
    """
    dtype = dtype_named(layout.dtype)
    wide = widen(np.empty(0, dtype)).dtype
    limits = np.finfo(wide) if wide.kind == "f" else np.iinfo(wide)
    # Not the largest finite number: a minimum of infinities must remain infinite.
    infinity = np.inf if wide.kind == "f" else None
    element = {
        "sum": 0,
        "product": 1,
        "min": infinity or limits.max,
        "max": -infinity if infinity else limits.min,
    }[layout.reduction]
    array = narrow(np.full(layout.length, element, wide), dtype)
    if not place:
        return Dense(array, layout.reduction)
    like = torch.empty(0, dtype=getattr(torch, layout.dtype), device=place)
    with on_own_stream(like.device):
        return Dense(DeferredGpuArray.now(tensor_of(array, like)), layout.reduction)


class ArrayIndex(NamedTuple):
    """One array of an operation that is ready, by the operation's index and its index in it.

    on_gpu: whether it is reduced on the GPU.
    """

    of: int
    place: int
    layout: Layout
    on_gpu: bool = False


def fuse_arrays(
    arrays: Iterable[ArrayIndex], threshold_bytes: int, alone_bytes: int
) -> list[list[ArrayIndex]]:
    """Group the arrays that are reduced as one; groups are in the order of their first arrays.

    threshold_bytes: the most bytes in a group. alone_bytes: from this size on an array is reduced
    alone, as copying it to the buffer and back takes longer than sharing a reduction saves.
    The same on every rank that has the same layouts in the same order.
    """
    bundles: list[list[ArrayIndex]] = []
    growing: dict[object, tuple[list[ArrayIndex], int]] = {}
    for array in arrays:
        dtype, length, *rest = array.layout
        size = length * dtype_named(dtype).itemsize
        if size >= alone_bytes or size > threshold_bytes:
            bundles.append([array])
            continue
        key = dtype, array.on_gpu, *rest
        members, held = growing.get(key, ([], 0))
        if not members or held + size > threshold_bytes:
            members, held = [], 0
            bundles.append(members)
        members.append(array)
        growing[key] = members, held + size
    return bundles


def scale(array: NDArray[Any], factor: float) -> None:
    """Multiply in place; integers in float64, truncated; 16-bit floats in float32."""
    if factor == 1.0:
        return
    if is_narrow(array.dtype):
        multiply(array, factor)
    elif array.dtype.kind != "f":
        array[...] = np.trunc(array * np.float64(factor))
    else:
        array *= array.dtype.type(factor)


class Fuser:
    """Reduces arrays as one; keeps the buffer for the next call."""

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

        layout: that of any of them.
        on_gpu: whether they are reduced on the GPU; all of them are `DeferredGpuArray` then.
        """
        if on_gpu:
            tensors = [
                (d.array, d.prescale) for d in members if isinstance(d.array, DeferredGpuArray)
            ]
            notice("begin", "reduce")
            reduce_as_one(tensors, layout.postscale, layout.reduction, transport)
            notice("end", "reduce")
            return
        arrays = [
            dense.array.on_host() if isinstance(dense.array, DeferredGpuArray) else dense.array
            for dense in members
        ]
        for dense, array in zip(members, arrays, strict=True):
            scale(array, dense.prescale)
        self._reduce_on_host(arrays, layout, transport, notice)
        for dense, array in zip(members, arrays, strict=True):
            if isinstance(dense.array, DeferredGpuArray):
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
        if self._buffer.size < size_bytes:
            self._buffer = np.empty(size_bytes, np.uint8)
        buffer = self._buffer[:size_bytes].view(dtype_named(layout.dtype))
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


def _reduce(array: NDArray[Any], layout: Layout, transport: Transport, notice: Notice) -> None:
    notice("begin", "reduce")
    transport.allreduce(array, layout.reduction)
    scale(array, layout.postscale)
    notice("end", "reduce")
