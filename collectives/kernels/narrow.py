"""narrow: 16-bit floats, which are widened to float32 for computing, and rounded afterwards.

NumPy has float16, but not bfloat16, the upper half of a float32. Arrays that could also be integers
use the structured dtype BFLOAT16, which NumPy copies and slices but refuses to compute with.
(Gradients are never integers, so there bfloat16 is plain uint16.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..vector import Array

if TYPE_CHECKING:
    import torch

BFLOAT16: Final = np.dtype([("bfloat16", np.uint16)])
_BLOCK: Final = 1 << 15  # elements that are rounded at a time, to stay in the cache


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is float16 or BFLOAT16."""
    return dtype in (np.float16, BFLOAT16)


def widen(array: Array) -> Array:
    """Return 16-bit floats as float32, and any other array itself."""
    if array.dtype == BFLOAT16:
        return widen_bfloat16(array.view(np.uint16))
    return array.astype(np.float32) if array.dtype == np.float16 else array


def narrow(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round widened values back to a dtype, to nearest, ties to even."""
    if dtype == BFLOAT16:
        return round_to_bfloat16(values.astype(np.float32, copy=False)).view(BFLOAT16)
    return values.astype(dtype, copy=False)


def widen_bfloat16(bits: Array) -> Array:
    """Return bits of bfloat16, uint16, as float32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def round_to_bfloat16(values: Array) -> Array:
    """Round float32 [n] to bfloat16, as bits, uint16, ties to even; NaN stays NaN."""
    rounded = np.empty(values.size, np.uint16)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        bits = block.view(np.uint32)
        halves = bits >> 16
        halves &= 1
        # Half a unit in the last place, less one if the last bit is 0: ties go to even.
        halves += 0x7FFF
        halves += bits
        halves >>= 16
        rounded[start : start + _BLOCK] = halves
        nans = np.isnan(block)  # a carry may have turned them into infinity or zero
        if nans.any():
            # Set the quiet bit: the upper half alone may be infinity's.
            rounded[start : start + _BLOCK][nans] = bits[nans] >> 16 | 0x40
    return rounded


def combine(array: Array, other: Array, reduction: str) -> None:
    """Reduce 16-bit floats with others in place: in float32, and rounded as `narrow` rounds.

    reduction: "sum", "product", "min" or "max".
    """
    # torch is 50 times as fast: NumPy converts float16 one by one.
    import torch

    operations: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    own = _tensor_on(array)
    operations[reduction](own, _tensor_on(other), out=own)


def multiply(array: Array, factor: float) -> None:
    """Multiply 16-bit floats in place by a factor in float32; rounded as `narrow` rounds."""
    _tensor_on(array).mul_(factor)


def _tensor_on(array: Array) -> torch.Tensor:
    """Return a tensor of the same memory."""
    import torch

    dtype = torch.bfloat16 if array.dtype == BFLOAT16 else torch.float16
    return torch.from_numpy(array.view(np.int16)).view(dtype)
