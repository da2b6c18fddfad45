"""Tensors as flat host arrays, in dtypes that NumPy and MPI can reduce, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


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
