"""What tensors collectives take, and how they become messages and come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...buckets.arrays import from_array, lies_as_array, to_array, view_dense


def check(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise ValueError for a layout or dtype that collectives do not take."""
    is_float8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    if tensor.layout != torch.strided or tensor.dtype.is_complex or is_float8:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    return tensor


def check_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise ValueError for one that cannot be overwritten as a whole."""
    if not check(tensor).is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a result of the tensor's kind."""
    return torch.empty_like(tensor, requires_grad=False)


def describe(tensor: torch.Tensor) -> str:
    """Return what must be equal on all ranks: dtype and shape."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def describe_rows(tensor: torch.Tensor) -> str:
    """Return what must be equal where the number of rows may differ."""
    if tensor.dim() == 0:
        return f"{tensor.dtype} scalar"
    return f"{tensor.dtype} [{', '.join(['*', *map(str, tensor.shape[1:])])}]"


def describe_each(
    tensors: Sequence[torch.Tensor], describe: Callable[[torch.Tensor], str], common: str = ""
) -> list[str]:
    """Return what must be equal of a group: what its tensors have in common, then each's own."""
    numbered = [f"tensor {number}: {describe(tensor)}" for number, tensor in enumerate(tensors)]
    return [f"{len(tensors)} tensors {common}".strip(), *numbered]


def row_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def view_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the tensor's elements, uint8 [numel * element_size]: its own memory where it can."""
    flat = tensor.detach().resolve_neg().reshape(-1).cpu()
    array: NDArray[np.uint8] = flat.contiguous().view(torch.uint8).numpy()
    return array


def from_bytes(
    message: NDArray[np.uint8], like: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Return such elements as a tensor of the dtype and device of `like`."""
    if not message.size:
        return like.new_empty(shape)
    return torch.from_numpy(message).view(like.dtype).reshape(shape).to(like.device)


def memory_of(output: torch.Tensor, tensor: torch.Tensor) -> NDArray[Any]:
    """Return the elements of a tensor as an array to reduce: in the output's memory, if it can be.

    output: the tensor itself, or one of its kind.
    """
    if not lies_as_array(output):
        return to_array(tensor)
    if output is not tensor:
        output.copy_(tensor.detach())
    return view_dense(output)


def writer(output: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Return the function that writes a reduced array into `output`, and returns it."""

    def write(array: NDArray[Any]) -> torch.Tensor:
        if lies_as_array(output) and array.ctypes.data == output.data_ptr():
            return output
        with torch.no_grad():
            return output.copy_(from_array(array, output))

    return write
