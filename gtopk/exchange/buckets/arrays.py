"""Tensors as flat arrays and back: host copies that MPI can reduce, or the same memory.

And what belongs to their device: its streams, and points in its time.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.kernels import Located, device
from collectives.kernels.narrow import BFLOAT16

_log = logging.getLogger("gtopk")


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy on the host that ranks can reduce, [numel]; bool as uint8."""
    flat = flattened(tensor)
    if flat.is_cuda:
        copy = begin_copy(flat)
        await_copies([flat])
        return view_dense(copy)
    # A copy, as the ranks' sum is written over it.
    return np.array(view_dense(flat))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as ranks can reduce them, [numel]; a view where possible."""
    # A tensor may be negated by a mark alone: its memory then holds the opposite values.
    flat = tensor.detach().resolve_neg().reshape(-1)
    flat = _of_stride_1(flat) if flat.is_contiguous() else flat
    return flat.to(torch.uint8) if flat.dtype == torch.bool else flat


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor's bytes, uint8 [numel * itemsize]; a view where possible."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _of_stride_1(dense).view(torch.uint8)


def _of_stride_1(contiguous: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, [numel], with stride 1.

    One or no element is contiguous with any stride, and views as another dtype fail then.
    """
    return contiguous.as_strided((contiguous.numel(),), (1,))


def begin_copy(flat: torch.Tensor) -> torch.Tensor:
    """Begin to copy a GPU's tensor to page-locked memory on the host, and return that.

    The copy is complete after `await_copies`.
    """
    # The host would wait for a copy into pageable memory, whatever `non_blocking` says.
    pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(flat, non_blocking=True)


def await_copies(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the copies of GPUs' tensors that were begun on the current streams."""
    for place in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(place).synchronize()


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on a device; to a GPU by way of page-locked memory, without a wait."""
    if device.type != "cuda":
        return host.to(device)
    # torch keeps the page-locked memory until the copy is done, though nothing refers to it here.
    return host.pin_memory().to(device, non_blocking=True)


def from_array(array: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Return the array as a tensor of the shape, dtype and device of `like`."""
    return to_device(view_tensor(array), like.device).to(like.dtype).reshape(like.shape)


def is_host_array(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's own memory is an array on the host that ranks can reduce in place."""
    as_numbers = tensor.dtype != torch.bool and not tensor.is_neg()
    return tensor.device.type == "cpu" and as_numbers and tensor.is_contiguous()


def view_dense(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a host tensor's own memory as an array that ranks can reduce, [numel].

    bfloat16 comes as BFLOAT16: it travels in 16 bits.
    """
    array = view_array(tensor.contiguous())
    return array.view(BFLOAT16) if tensor.dtype == torch.bfloat16 else array


def view_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the tensor's own memory as an array, [numel]: NumPy's on the host, CuPy's on a GPU.

    bfloat16 comes as its bits, uint16. Later work on the array comes after pending work of torch's
    current stream, by an event; the host does not wait. Raises ValueError for a tensor that is not
    contiguous: it has no such view.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            "only a contiguous tensor can be viewed as an array, got strides "
            f"{tuple(tensor.stride())} for shape {list(tensor.shape)}; use tensor.contiguous()"
        )
    flat = _of_stride_1(tensor.detach())
    # NumPy has no bfloat16, and torch has uint16 only since 2.3: so by way of int16.
    bits = flat.dtype == torch.bfloat16
    if bits:
        flat = flat.view(torch.int16)
    array: NDArray[Any]
    if flat.is_cuda:
        with torch.cuda.device(flat.device):  # as in `current_stream`
            array = device.from_dlpack(flat)
    else:
        array = flat.numpy()
    return array.view(np.uint16) if bits else array


class Memory(NamedTuple):
    """One vector, as a tensor and as the kernels' array of the same memory."""

    tensor: torch.Tensor
    array: NDArray[Any]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        return cls(tensor, view_array(tensor))

    def like(self) -> Memory:
        """Return uninitialized memory of the same kind."""
        return Memory.of(torch.empty_like(self.tensor))


def located(tensors: Sequence[torch.Tensor]) -> Located:
    """Return the addresses of contiguous tensors of one dtype on a GPU, for the kernels.

    Kernels on torch's current stream come after pending writes to them.
    """
    return Located(
        _numpys(tensors[0].dtype),
        tuple(tensor.data_ptr() for tensor in tensors),
        tuple(tensor.numel() for tensor in tensors),
    )


def _numpys(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype of the kernels' arrays; bfloat16 comes as its bits."""
    return np.dtype(np.uint16 if dtype == torch.bfloat16 else str(dtype).partition(".")[2])


def view_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array's own memory as a tensor, on the array's device, [size].

    Later work of torch comes after pending work of CuPy's current stream.
    """
    if isinstance(array, np.ndarray):
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    tensor: torch.Tensor = torch.from_dlpack(array)
    return tensor


def zeros(length: int, dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    """Return zeros, [length], ready for any stream: waits until a GPU has written them."""
    tensor = torch.zeros(length, dtype=getattr(torch, dtype.name), device=device)
    # Once, where it is made: any stream may use it from then on without waiting.
    if tensor.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return tensor


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the kernels' device for these: their GPU, where all are on one; else the host."""
    # One launch reads all of a bucket: with parameters on several GPUs it works on the host.
    devices = {parameter.device for parameter in parameters}
    if len(devices) == 1 and next(iter(devices)).type == "cuda" and _kernels_reach_gpus():
        return devices.pop()
    return torch.device("cpu")


@functools.cache
def _kernels_reach_gpus() -> bool:
    """Tell whether the kernels can work on GPUs; warn, once, where they cannot."""
    try:
        device.cupy()
    except ImportError as error:
        _log.warning("gradients on a GPU go through the host, there and back: %s", error)
        return False
    return True


def current_stream(of: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context maker that puts torch and the kernels on a device's now current stream.

    It works in any thread, at any time: work launched in the context comes after all that is on the
    stream by then, and before what is launched there later. No event is needed; nothing waits.
    """
    if of.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(of)

    @contextmanager
    def on_stream() -> Iterator[None]:
        with (
            _on_streams([stream]),
            device.on_stream(stream.cuda_stream, stream.device_index, torch.cuda.empty_cache),
        ):
            yield

    return on_stream


def current_streams(of: Sequence[torch.device]) -> Callable[[], AbstractContextManager[None]]:
    """Return the same for several GPUs, for torch alone, without the kernels."""
    if not of:
        return nullcontext
    streams = [torch.cuda.current_stream(gpu) for gpu in of]
    return lambda: _on_streams(streams)


@contextmanager
def _on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    with ExitStack() as entered:
        for stream in streams:
            # A thread begins on GPU 0. torch.cuda.stream alone would return there by cudaSetDevice,
            # which opens a context on it; torch.cuda.device returns without opening one.
            entered.enter_context(torch.cuda.device(stream.device))
            entered.enter_context(torch.cuda.stream(stream))
        yield


class Timestamp:
    """A point in a device's work; on a GPU, the time when its current stream gets there.

    A host clock would tell when the GPU's work was launched, not when it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: Timestamp) -> float:
        """Return the seconds from this time to a later one; waits until a GPU has reached it."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3
