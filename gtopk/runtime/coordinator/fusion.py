"""Fusion: reduce small dense arrays together if they are ready at the same time.

    engine.submit(name, signature, work, fusion=[Dense(array)])

Before it calls `work`, the engine reduces an operation's dense arrays in place: alone, or in one
buffer with arrays of other operations that became ready in the same cycle and have the same key.
`work(transport, all_flags)` does the rest (an integer division, say) and returns the operation's
result. Several arrays in one operation are a group: either all are reduced or none.

Such an operation needs no join descriptor: a joined rank takes part with the neutral element (zeros
in a sum). The engine checks dtype, length, reduction and factors across ranks, after the
operation's own signature.

    arrays, in the order all ranks agree on     reduced
    a  float32 sum   1 KB                       a c   in the buffer
    b  float32 sum   4 MB                       b     alone, in its own memory
    c  float32 sum   2 KB                       d     alone: no other has its key
    d  float64 sum   1 KB

GPU tensors (`DeferredGpuArray`) are reduced on the GPU if the flags say that every rank has its
tensor on one, else through the host. The engine's thread works on its own CUDA stream:

    submitter's stream   ... make the tensor | event                           | wait | use it
                                             v                                 ^
    engine's stream                            wait | scale, fuse, NCCL, scale | event

So the engine does not wait for backward work that the submitter's stream runs after that event.
Tensors on the host, as in tests, have no streams and no events.
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

# Flags of operations that can run on a GPU; a joined rank has 0.
ON_HOST, ON_GPU = 1, 2

# CUDA streams per thread: each process set has its own engine thread.
_thread_local: Final = threading.local()

Event = Any  # torch.cuda.Event, or None on the host


@dataclass(frozen=True)
class DeferredGpuArray:
    """A flat, contiguous tensor that is reduced where it is.

    ready: the event after which the values are ready, recorded by the submitting thread.
    """

    tensor: torch.Tensor
    ready: Event

    @classmethod
    def now(cls, tensor: torch.Tensor) -> DeferredGpuArray:
        """Wrap a tensor whose values come from work already queued on the current stream."""
        return cls(tensor, record_event(tensor.device))

    def on_host(self) -> NDArray[Any]:
        """Return a host copy once the values are ready; bfloat16 as BFLOAT16."""
        with on_own_stream(self.tensor.device, [self.ready]):
            return host_copy(self.tensor)

    def bytes_on_host(self) -> NDArray[np.uint8]:
        """Return the bytes on the host, uint8 [bytes]; the values must be ready."""
        return host_copy(self.tensor.view(torch.uint8))

    def write(self, array: NDArray[Any]) -> None:
        """Copy an array in the format of `on_host` into the tensor."""
        # No event to wait for: the preceding `on_host` has waited for the values.
        with on_own_stream(self.tensor.device):
            self.tensor.copy_(tensor_of(array, self.tensor))


def all_on_gpu(all_flags: Sequence[int]) -> bool:
    """Tell whether every participating rank has its tensors on a GPU."""
    participating = {flags for flags in all_flags if flags}
    return participating == {ON_GPU}


def record_event(device: torch.device) -> Event:
    """Return an event after the work queued so far on a device's current stream."""
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
    streams: dict[int, torch.cuda.Stream] = _thread_local.__dict__.setdefault("streams", {})
    index = device.index or 0
    # Needed around both: on exit, torch.cuda.stream alone would open a context on GPU 0.
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
    """The end of an operation's GPU work: `on` records it, `wait` waits for it, if any."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._end: Event = None

    @contextmanager
    def on(self, device: torch.device, ready: Sequence[Event] = ()) -> Iterator[None]:
        """Work on this thread's own stream of a device, after `ready`; record the end."""
        with on_own_stream(device, ready):
            yield
            # Inside the context, so that the event is on this thread's own stream.
            self._device, self._end = device, record_event(device)

    def wait(self, results: Iterable[Any] = ()) -> None:
        """Make the current stream wait for the end; the host does not wait.

        results: the operation's; its tensors are recorded on the current stream. Their memory
            belongs to the stream that made them: torch would reuse it while this stream reads.
        """
        if self._end is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._end)
        for result in results:
            if getattr(result, "is_cuda", False):
                result.record_stream(stream)


def scale_tensor(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place: integers in float64, truncated; 16-bit floats in float32."""
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

    members: tensors, each with its factor before the reduction; postscale: the factor after it.
    """
    tensors = [each.tensor for each, _ in members]
    prescales = {prescale for _, prescale in members}
    with on_own_stream(tensors[0].device, [each.ready for each, _ in members]):
        if len(prescales) > 1:  # a stand-in for a joined rank has another factor
            for tensor, (_, prescale) in zip(tensors, members, strict=True):
                scale_tensor(tensor, prescale)
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if len(prescales) == 1:
            scale_tensor(whole, *prescales)
        transport.allreduce(whole, reduction)  # type: ignore[arg-type]
        scale_tensor(whole, postscale)
        if len(tensors) > 1:
            parts = whole.split([tensor.numel() for tensor in tensors])
            # One kernel launch for all of them.
            torch._foreach_copy_(tensors, list(parts))


# Called at the beginning and end of each phase of a reduction.
Notify = Callable[[Literal["begin", "end"], Literal["copy-in", "reduce", "copy-out"]], None]

_BFLOAT16: Final = "bfloat16"


class Dense(NamedTuple):
    """An array to reduce over the ranks in place.

    array:     host array or `DeferredGpuArray`; one-dimensional, contiguous, writable; nothing else
               may read or write it until the operation is done.
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
    """A dense array's description without its values, equal on all ranks; dtype by name."""

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
    """Return an array's layout; raise ValueError if it cannot be reduced in place."""
    array = dense.array
    # Layouts are announced with msgpack, which does not accept NumPy scalars.
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
    """Return the dtype of a layout's dtype name."""
    return BFLOAT16 if name == _BFLOAT16 else np.dtype(name)


def neutral_array(layout: Layout, device: str = "") -> Dense:
    """Return an array of the reduction's neutral element.

    device: the device for a tensor; "": an array on the host.
    """
    dtype = dtype_named(layout.dtype)
    wide = widen(np.empty(0, dtype)).dtype
    limits = np.finfo(wide) if wide.kind == "f" else np.iinfo(wide)
    # Not the largest finite number: the minimum of infinities must stay infinite.
    infinity = np.inf if wide.kind == "f" else None
    element = {
        "sum": 0,
        "product": 1,
        "min": infinity or limits.max,
        "max": -infinity if infinity else limits.min,
    }[layout.reduction]
    array = narrow(np.full(layout.length, element, wide), dtype)
    if not device:
        return Dense(array, layout.reduction)
    like = torch.empty(0, dtype=getattr(torch, layout.dtype), device=device)
    with on_own_stream(like.device):
        return Dense(DeferredGpuArray.now(tensor_of(array, like)), layout.reduction)


class ArrayIndex(NamedTuple):
    """One array of a ready operation: the operation's index, and the array's index in it.

    on_gpu: whether it is reduced on the GPU.
    """

    operation: int
    array: int
    layout: Layout
    on_gpu: bool = False


def fuse_arrays(
    arrays: Iterable[ArrayIndex], threshold_bytes: int, alone_bytes: int
) -> list[list[ArrayIndex]]:
    """Group the arrays to reduce together; groups are in the order of their first arrays.

    threshold_bytes: most bytes in a group. alone_bytes: arrays of at least this size are reduced
    alone, because copying them to the buffer and back takes longer than sharing saves.
    The same layouts in the same order give the same groups on every rank.
    """
    groups: list[list[ArrayIndex]] = []
    open_groups: dict[object, tuple[list[ArrayIndex], int]] = {}
    for array in arrays:
        dtype, length, *rest = array.layout
        size = length * dtype_named(dtype).itemsize
        if size >= alone_bytes or size > threshold_bytes:
            groups.append([array])
            continue
        key = dtype, array.on_gpu, *rest
        members, group_bytes = open_groups.get(key, ([], 0))
        if not members or group_bytes + size > threshold_bytes:
            members, group_bytes = [], 0
            groups.append(members)
        members.append(array)
        open_groups[key] = members, group_bytes + size
    return groups


def scale(array: NDArray[Any], factor: float) -> None:
    """Multiply in place: integers in float64, truncated; 16-bit floats in float32."""
    if factor == 1.0:
        return
    if is_narrow(array.dtype):
        multiply(array, factor)
    elif array.dtype.kind != "f":
        array[...] = np.trunc(array * np.float64(factor))
    else:
        array *= array.dtype.type(factor)


class Fuser:
    """Reduces arrays together; keeps the buffer for the next call."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def reduce(
        self,
        members: Sequence[Dense],
        layout: Layout,
        transport: Transport,
        notify: Notify,
        on_gpu: bool = False,
    ) -> None:
        """Reduce arrays with one key over the ranks, each in its own memory.

        layout: the layout of any of them.
        on_gpu: whether to reduce on the GPU; all must then be `DeferredGpuArray`.
        """
        if on_gpu:
            tensors = [
                (d.array, d.prescale) for d in members if isinstance(d.array, DeferredGpuArray)
            ]
            notify("begin", "reduce")
            reduce_as_one(tensors, layout.postscale, layout.reduction, transport)
            notify("end", "reduce")
            return
        arrays = [
            dense.array.on_host() if isinstance(dense.array, DeferredGpuArray) else dense.array
            for dense in members
        ]
        for dense, array in zip(members, arrays, strict=True):
            scale(array, dense.prescale)
        self._reduce_on_host(arrays, layout, transport, notify)
        for dense, array in zip(members, arrays, strict=True):
            if isinstance(dense.array, DeferredGpuArray):
                dense.array.write(array)

    def _reduce_on_host(
        self,
        arrays: Sequence[NDArray[Any]],
        layout: Layout,
        transport: Transport,
        notify: Notify,
    ) -> None:
        if len(arrays) == 1:
            _reduce(arrays[0], layout, transport, notify)
            return
        notify("begin", "copy-in")
        size_bytes = sum(array.nbytes for array in arrays)
        if self._buffer.size < size_bytes:
            self._buffer = np.empty(size_bytes, np.uint8)
        buffer = self._buffer[:size_bytes].view(dtype_named(layout.dtype))
        np.concatenate(arrays, out=buffer)
        notify("end", "copy-in")
        _reduce(buffer, layout, transport, notify)
        notify("begin", "copy-out")
        start = 0
        for array in arrays:
            end = start + array.size
            array[...] = buffer[start:end]
            start = end
        notify("end", "copy-out")


def _reduce(array: NDArray[Any], layout: Layout, transport: Transport, notify: Notify) -> None:
    notify("begin", "reduce")
    transport.allreduce(array, layout.reduction)
    scale(array, layout.postscale)
    notify("end", "reduce")
