"""Tensors as flat arrays and back: host copies that MPI can reduce, or views of the same memory.

Also the streams and timestamps of the tensors' device.
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
    # Copy, because the ranks' sum overwrites it.
    return np.array(view_dense(flat))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in a form that ranks can reduce, [numel]; a view if possible."""
    # A set negation bit only marks a tensor as negated: its memory has the opposite signs.
    flat = tensor.detach().resolve_neg().reshape(-1)
    flat = _of_stride_1(flat) if flat.is_contiguous() else flat
    return flat.to(torch.uint8) if flat.dtype == torch.bool else flat


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor's bytes, uint8 [numel * itemsize]; a view if possible."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _of_stride_1(dense).view(torch.uint8)


def _of_stride_1(contiguous: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, [numel], with stride 1.

    A tensor of at most one element is contiguous with any stride, but view(dtype) requires 1.
    """
    return contiguous.as_strided((contiguous.numel(),), (1,))


def begin_copy(flat: torch.Tensor) -> torch.Tensor:
    """Start copying a GPU tensor to page-locked host memory, and return the host tensor.

    The copy is complete after `await_copies`.
    """
    # A copy into pageable memory would block the host, despite `non_blocking`.
    pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(flat, non_blocking=True)


def await_copies(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the copies of GPU tensors that were started on the current streams."""
    for gpu in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(gpu).synchronize()


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device; for a GPU through page-locked memory, without waiting."""
    if device.type != "cuda":
        return host.to(device)
    # torch keeps the page-locked memory until the copy is done, even without a reference to it.
    return host.pin_memory().to(device, non_blocking=True)


def from_array(array: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Return the array as a tensor of the shape, dtype and device of `like`."""
    return to_device(view_tensor(array), like.device).to(like.dtype).reshape(like.shape)


def is_host_array(tensor: torch.Tensor) -> bool:
    """Return whether ranks can reduce this tensor's own memory in place, as a host array."""
    as_numbers = tensor.dtype != torch.bool and not tensor.is_neg()
    return tensor.device.type == "cpu" and as_numbers and tensor.is_contiguous()


def view_dense(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a host tensor's own memory as an array that ranks can reduce, [numel].

    bfloat16 is returned as BFLOAT16, which is sent in 16 bits.
    """
    array = view_array(tensor.contiguous())
    return array.view(BFLOAT16) if tensor.dtype == torch.bfloat16 else array


def view_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the tensor's own memory as an array, [numel]: NumPy's on the host, CuPy's on a GPU.

    bfloat16 is returned as its bits, uint16. Later work on the array waits, by an event, for
    pending work on torch's current stream; the host does not wait. Raises ValueError for a tensor
    that is not contiguous and so has no such view.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            "only a contiguous tensor can be viewed as an array, got strides "
            f"{tuple(tensor.stride())} for shape {list(tensor.shape)}; use tensor.contiguous()"
        )
    flat = _of_stride_1(tensor.detach())
    # NumPy has no bfloat16, and torch has uint16 only since 2.3, so go through int16.
    is_bfloat16 = flat.dtype == torch.bfloat16
    if is_bfloat16:
        flat = flat.view(torch.int16)
    array: NDArray[Any]
    if flat.is_cuda:
        with torch.cuda.device(flat.device):  # as in `current_stream`
            array = device.from_dlpack(flat)
    else:
        array = flat.numpy()
    return array.view(np.uint16) if is_bfloat16 else array


class Memory(NamedTuple):
    """One vector, both as a tensor and as the kernels' array of the same memory."""

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

    Kernels on torch's current stream run after pending writes to them.
    """
    return Located(
        _numpy_dtype(tensors[0].dtype),
        tuple(tensor.data_ptr() for tensor in tensors),
        tuple(tensor.numel() for tensor in tensors),
    )


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the kernels' dtype for a torch dtype; bfloat16 is handled as its bits."""
    return np.dtype(np.uint16 if dtype == torch.bfloat16 else str(dtype).partition(".")[2])


def view_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array's own memory as a tensor, on the array's device, [size].

    Later work in torch waits for pending work on CuPy's current stream.
    """
    if isinstance(array, np.ndarray):
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    tensor: torch.Tensor = torch.from_dlpack(array)
    return tensor


def zeros(length: int, dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    """Return zeros, [length], usable on any stream: waits until a GPU has written them."""
    tensor = torch.zeros(length, dtype=getattr(torch, dtype.name), device=device)
    # Wait once, at creation: from then on any stream may use it without waiting.
    if tensor.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return tensor


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the device for the kernels: the parameters' GPU if all share one, else the host."""
    # One kernel launch reads the whole bucket, so a bucket that spans GPUs works on the host.
    devices = {parameter.device for parameter in parameters}
    if len(devices) == 1 and next(iter(devices)).type == "cuda" and _kernels_reach_gpus():
        return devices.pop()
    return torch.device("cpu")


@functools.cache
def _kernels_reach_gpus() -> bool:
    """Return whether the kernels can work on GPUs; if not, warn once."""
    try:
        device.cupy()
    except ImportError as error:
        _log.warning("gradients on a GPU are exchanged through host memory: %s", error)
        return False
    return True


def current_stream(torch_device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context maker that puts torch and the kernels on a device's current stream.

    The stream is the one that is current now. The context works in any thread, at any time: its
    work runs after all work that is on the stream by then, and before work launched there later.
    No event is needed, and nothing waits.
    """
    if torch_device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(torch_device)

    @contextmanager
    def on_stream() -> Iterator[None]:
        with (
            _on_streams([stream]),
            device.on_stream(stream.cuda_stream, stream.device_index, torch.cuda.empty_cache),
        ):
            yield

    return on_stream


def current_streams(devices: Sequence[torch.device]) -> Callable[[], AbstractContextManager[None]]:
    """Return the same as `current_stream` for several GPUs, for torch only, not the kernels."""
    if not devices:
        return nullcontext
    streams = [torch.cuda.current_stream(gpu) for gpu in devices]
    return lambda: _on_streams(streams)


@contextmanager
def _on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    with ExitStack() as entered:
        for stream in streams:
            # A thread starts on GPU 0. torch.cuda.stream alone would return there by cudaSetDevice,
            # which opens a context on GPU 0; torch.cuda.device returns without opening one.
            entered.enter_context(torch.cuda.device(stream.device))
            entered.enter_context(torch.cuda.stream(stream))
        yield


class Timestamp:
    """A point in a device's work; on a GPU, the time when its current stream gets there.

    The host's clock would only show when the GPU's work was launched, not when it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: Timestamp) -> float:
        """Return the seconds until a later timestamp; waits until the GPU has reached that."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3
