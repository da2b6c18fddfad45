"""What may be added to a residual: one array or one for each parameter, through a velocity or not.

Every twin takes its arguments from here, so that all refuse the same ones with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..vector import Array, is_on_device, require_values

# One array of the residual's length, or several that follow each other in it.
Gradient: TypeAlias = Array | Sequence[Array]

# uint16: the bits of bfloat16, which NumPy does not know.
SIXTEEN_BITS: Final = (np.dtype(np.float16), np.dtype(np.uint16))


class Momentum(NamedTuple):
    """Momentum before the selection: velocity = factor * velocity + gradient is what is added.

    velocity: of the residual's dtype and length, changed in place.
    """

    velocity: Array
    factor: float


def require_parts(parts: Sequence[Array], dtype: np.dtype[Any], length: int, what: str) -> None:
    """Raise ValueError unless the parts make up a vector of this dtype, or of 16 bits for it."""
    dtypes, size = {part.dtype for part in parts}, sum(part.size for part in parts)
    narrow = dtype == np.float32 and len(dtypes) == 1 and dtypes <= set(SIXTEEN_BITS)
    if not (dtypes == {dtype} or narrow) or size != length:
        got = " and ".join(sorted(map(str, dtypes))) or "nothing"
        raise ValueError(
            f"{what} dtype and size (16-bit ones fit float32), {dtype} [{length}], "
            f"got {got} [{size}]"
        )


def require_selectable(dense: Array, k: int) -> None:
    """Raise ValueError unless k entries can be selected from a dense vector: 1 <= k <= n."""
    require_values(dense)
    if dense.ndim != 1:
        shape = list(dense.shape)
        raise ValueError(f"select from a one-dimensional array, got {shape}: pass .reshape(-1)")
    if not 1 <= k <= dense.size:
        raise ValueError(f"k must lie in 1..{dense.size} (the vector's length), got {k}")


def gradient_parts(
    residual: Array, gradient: Gradient, k: int, momentum: Momentum | None
) -> Sequence[Array]:
    """Return the gradient's arrays in order; ValueError or TypeError for what does not fit."""
    require_selectable(residual, k)
    parts = gradient if isinstance(gradient, Sequence) else [gradient]
    if not is_on_device(residual) and any(map(is_on_device, parts)):
        raise TypeError("the gradient must be NumPy's, as the residual is; got CuPy's")
    dtype = residual.dtype
    require_parts(parts, dtype, residual.size, "the gradient must be of the residual's")
    if momentum is not None:
        velocity = momentum.velocity
        if (velocity.dtype, velocity.shape) != (dtype, residual.shape):
            raise ValueError(
                f"the velocity must be of the residual's dtype and size, {dtype} "
                f"[{residual.size}], got {velocity.dtype} {list(velocity.shape)}"
            )
    return parts
