"""Gradients to add to a residual: one array or one for each parameter, with momentum or without.

Every twin checks its arguments here, so that all refuse the same ones with the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..vector import Array, is_on_device, require_values

# uint16: the bits of bfloat16, which NumPy does not know.
SIXTEEN_BITS: Final = (np.dtype(np.float16), np.dtype(np.uint16))


@dataclass(frozen=True)
class Located:
    """Arrays on a GPU that follow each other in a vector, by their addresses.

    The kernels read and write them through a table. The caller keeps the memory alive, and ensures
    that the elements of each array lie side by side.

    dtype:     of all arrays.
    addresses: device pointers, one an array.
    sizes:     of the arrays, in elements.
    """

    dtype: np.dtype[Any]
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


# One array of the residual's length, or several that follow each other in it.
Gradient: TypeAlias = Array | Sequence[Array] | Located


class Momentum(NamedTuple):
    """Momentum before the selection: adds velocity = factor * velocity + gradient.

    velocity: of the residual's dtype and length.
    factor:   of the old velocity in the new one.
    into:     memory for the new velocity, like the old one's; None: the old one is overwritten.
    """

    velocity: Array
    factor: float
    into: Array | None = None


def require_parts(
    parts: Sequence[Array] | Located, dtype: np.dtype[Any], length: int, what: str
) -> None:
    """Raise ValueError unless the parts make up a vector of this dtype, or of 16 bits for it."""
    if isinstance(parts, Located):
        dtypes, size = {parts.dtype}, sum(parts.sizes)
    else:
        dtypes, size = {part.dtype for part in parts}, sum(part.size for part in parts)
        for part in parts:
            if part.ndim != 1:
                shape = list(part.shape)
                raise ValueError(f"{what} shape, one-dimensional, got {shape}: pass .reshape(-1)")
    # All of one dtype: kernels are told a single format for all arrays.
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
    residual: Array,
    gradient: Gradient,
    k: int,
    momentum: Momentum | None,
    into: Array | None = None,
) -> Sequence[Array] | Located:
    """Return the gradient's arrays in order.

    Raises ValueError or TypeError for arguments that do not fit together.
    """
    require_selectable(residual, k)
    # To Python an array is no Sequence, so a single one becomes the only part.
    parts = gradient if isinstance(gradient, Sequence | Located) else [gradient]
    on_device = isinstance(parts, Located) or any(map(is_on_device, parts))
    if on_device and not is_on_device(residual):
        raise TypeError("the gradient must be NumPy's, as the residual is; got CuPy's")
    require_parts(parts, residual.dtype, residual.size, "the gradient must be of the residual's")
    _require_room(residual, residual, into, "the residual", "the memory for the sum")
    if momentum is not None:
        old, new = "the velocity", "the memory for the velocity"
        _require_room(residual, momentum.velocity, momentum.into, old, new)
    return parts


def _require_room(residual: Array, old: Array, into: Array | None, *names: str) -> None:
    """Raise ValueError unless the old values, and the memory for new ones, are like the residual.

    New values go to `into`, or to the old ones' place; names: of both arrays, for the error.
    """
    for array, name in zip((old, into), names, strict=True):
        if array is not None and (array.dtype, array.shape) != (residual.dtype, residual.shape):
            raise ValueError(
                f"{name} must be of the residual's dtype and size, {residual.dtype} "
                f"[{residual.size}], got {array.dtype} {list(array.shape)}"
            )
    # With `into` the old values are only read.
    require_writable(*((old, names[0]) if into is None else (into, names[1])))


def require_writable(array: Array, name: str) -> None:
    """Raise ValueError for an array on the host that is read-only."""
    if not is_on_device(array) and not array.flags.writeable:
        raise ValueError(f"{name} must not be read-only: pass a copy")


def host_parts(residual: Array, *others: Any) -> Sequence[Array]:
    """Return the arrays as `gradient_parts` does, for a residual on the host."""
    parts = gradient_parts(residual, *others)
    assert not isinstance(parts, Located)  # a GPU's, which was refused
    return parts
