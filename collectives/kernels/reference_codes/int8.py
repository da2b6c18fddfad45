"""int8: values as 8-bit integers, with a power of two for each block of 64.

    +------------------+---------------+
    | steps uint8 [b]  | int8 [k]      |     value = integer * 2^(exponent - step of its block)
    +------------------+---------------+

exponent is the message's. The integers of a block reach 64..127, unless its values are 2^248
times smaller than the message's largest. Step 255: the block holds a NaN or an infinity, and all
of it decodes as NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...vector import Array
from .scale import TOP, common_exponent, exponents, in_rows, scaled

BLOCK: Final = 64
_SMALLEST: Final = 254
_NOT_FINITE: Final = 255


def int8_bytes(count: int) -> int:
    """Return how many bytes the code of `count` values takes."""
    return count + -(-count // BLOCK)


def pack_int8(values: Array, out: Array) -> int:
    """Write the values, float32 or float64 [k], into uint8 [int8_bytes(k)]; return the exponent."""
    exponent = common_exponent("int8", values)
    blocks = in_rows(values, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    steps = np.minimum(exponent - (exponents(largest) - TOP["int8"]), _SMALLEST)
    steps[largest == 0] = 0
    # Clipped: from 127.5 on a value rounds to 128, which a byte does not hold.
    integers = np.rint(scaled(blocks, (steps - exponent)[:, None])).clip(-127, 127)
    finite = np.isfinite(largest)
    # A NaN has no integer: the block's step marks it.
    integers[~finite] = 0
    steps[~finite] = _NOT_FINITE
    out[: steps.size] = steps
    out[steps.size :].view(np.int8)[:] = integers.ravel()[: values.size]
    return exponent


def unpack_int8(data: Array, count: int, exponent: int, dtype: np.dtype[Any]) -> Array:
    """Return the values, of the dtype, [count]."""
    steps = data[: -(-count // BLOCK)].astype(np.int64)
    blocks = in_rows(data[steps.size :].view(np.int8).astype(dtype), BLOCK)
    values = scaled(blocks, (exponent - steps)[:, None])
    values[steps == _NOT_FINITE] = np.nan
    unpacked: Array = values.ravel()[:count]
    return unpacked
