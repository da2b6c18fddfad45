"""Tensors as flat arrays and back: host copies that MPI can reduce, or the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.kernels import device


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy on the host, [numel]; bfloat16 as float32 and bool as uint8."""
    flat = tensor.detach().reshape(-1).cpu()
    if flat.dtype == torch.bfloat16:
        flat = flat.float()
    elif flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    array: NDArray[Any] = np.array(flat.numpy())
    return array


def from_array(array: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Return the array as a tensor of the shape, dtype and device of `like`."""
    return torch.from_numpy(array).to(device=like.device, dtype=like.dtype).reshape(like.shape)


def view_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the tensor's own memory as an array, [numel]: NumPy's on the host, CuPy's on a GPU.

    bfloat16 comes as its bits, uint16. What torch has still to write there on its current stream
    comes first, by an event; nothing waits on the host. Raises ValueError for a tensor whose
    elements do not lie side by side: it has no such view.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            "only a contiguous tensor can be viewed as an array, got strides "
            f"{tuple(tensor.stride())} for shape {list(tensor.shape)}; use tensor.contiguous()"
        )
    flat = tensor.detach().view(-1)
    bits = flat.dtype == torch.bfloat16
    if bits:
        flat = flat.view(torch.int16)
    array: NDArray[Any] = device.from_dlpack(flat) if flat.is_cuda else flat.numpy()
    return array.view(np.uint16) if bits else array


def view_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array's own memory as a tensor, on the array's device, [size].

    What CuPy has still to write there on its current stream comes before what torch does next.
    """
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    tensor: torch.Tensor = torch.from_dlpack(array)
    return tensor


@contextmanager
def stream_of(tensor: torch.Tensor) -> Iterator[None]:
    """Have the kernels work on torch's current stream of the tensor's GPU; on the host, as ever."""
    if not tensor.is_cuda:
        yield
        return
    stream = torch.cuda.current_stream(tensor.device)
    with device.on_stream(stream.cuda_stream, stream.device_index):
        yield
