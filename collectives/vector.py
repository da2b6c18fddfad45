"""SparseVector, the type of everything between select and apply; dense vectors in several arrays.

Also the checks of both as arguments. All kernel implementations share them, so they reject the same
arguments with the same messages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

VALUE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
# uint16: the bits of bfloat16, which NumPy does not know.
SIXTEEN_BITS: Final = (np.dtype(np.float16), np.dtype(np.uint16))


def is_on_device(array: Array) -> bool:
    """Tell whether an array is a CuPy one; raise TypeError for an object that is no array."""
    if isinstance(array, np.ndarray):
        return False
    if hasattr(array, "__cuda_array_interface__"):
        return True
    raise TypeError(
        f"arrays must be NumPy's or CuPy's, got {type(array).__name__}; "
        "make them NumPy's: tensor.numpy(), np.array(list)"
    )


def module_of(array: Array) -> Any:
    """Return the module of an array's type: numpy, or cupy."""
    # By the name of the array's type, so that CuPy need not be installed, nor imported here.
    return sys.modules[type(array).__module__.partition(".")[0]]


def index_dtype(length: int) -> np.dtype[Any]:
    """Return the narrowest index dtype for vectors of this length: int32 up to 2^31 - 1."""
    return np.dtype(np.int32 if length <= np.iinfo(np.int32).max else np.int64)


_counted = np.arange(0, dtype=index_dtype(0))


def all_indices(length: int, like: Array) -> Array:
    """Return 0 .. length - 1 of `index_dtype`, on the device of `like`. Do not write to it.

    On the host, later calls share the array: writing it takes as long as coding so many values.
    """
    global _counted
    dtype, counted = index_dtype(length), _counted
    if not isinstance(like, np.ndarray) or dtype != counted.dtype:
        indices: Array = module_of(like).arange(length, dtype=dtype)
        return indices
    if length > counted.size:  # threads may do so at once: each returns its own
        counted = np.arange(length, dtype=dtype)
        counted.flags.writeable = False
        _counted = counted
    return counted[:length]


@dataclass(frozen=True)
class Located:
    """Arrays on a GPU that together make up one vector, given by their addresses.

    The caller keeps the memory alive. Each array must be contiguous.

    dtype:     of all arrays.
    addresses: device pointers, one an array.
    sizes:     of the arrays, in elements.
    """

    dtype: np.dtype[Any]
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


# One array of the residual's length, or several that make up that length in order.
Gradient: TypeAlias = Array | Sequence[Array] | Located


class Momentum(NamedTuple):
    """Momentum before the selection: velocity = factor * velocity + gradient is accumulated.

    velocity: of the residual's dtype and length.
    into:     array for the new velocity, like the old one; None: updated in place.
    """

    velocity: Array
    factor: float
    into: Array | None = None


class SparseVector(NamedTuple):
    """The nonzero entries of a vector of `length` elements.

    indices: int32 (int64 from 2^31 elements on) [k], strictly increasing, in 0..length-1.
    values:  float32 or float64 [k], in the order of the indices.

    Both are NumPy arrays, or both CuPy arrays. Functions never modify the arrays of an argument.
    """

    indices: Array
    values: Array
    length: int

    @classmethod
    def empty(
        cls, length: int, dtype: np.dtype[Any] | type = np.float32, like: Array | None = None
    ) -> SparseVector:
        """Return the vector of zeros; `like`: an array of the library to use, by default NumPy."""
        arrays = np if like is None else module_of(like)
        return cls(arrays.empty(0, index_dtype(length)), arrays.empty(0, dtype), length)

    @classmethod
    def from_dense(cls, dense: Array) -> SparseVector:
        """Return every nonzero entry of a one-dimensional array."""
        indices = module_of(dense).flatnonzero(dense).astype(index_dtype(dense.size))
        return cls(indices, dense[indices], dense.size)

    def to_dense(self) -> Array:
        """Return the vector as an array of `length` elements."""
        dense: Array = module_of(self.values).zeros(self.length, self.values.dtype)
        dense[self.indices] = self.values
        return dense

    def where(self, mask: Array) -> SparseVector:
        """Return the entries where `mask` (bool [k]) is true."""
        # Positions are faster: with a boolean mask NumPy takes an unpredictable branch per entry.
        positions = module_of(mask).flatnonzero(mask)
        return SparseVector(self.indices[positions], self.values[positions], self.length)

    def on_host(self) -> SparseVector:
        """Return the vector with NumPy arrays: itself, or a copy from the GPU, which it awaits."""
        if isinstance(self.values, np.ndarray):
            return self
        return SparseVector(self.indices.get(), self.values.get(), self.length)

    def beside(self, array: Array) -> SparseVector:
        """Return a host vector in the memory of `array`'s library (and current GPU)."""
        kind = module_of(array)
        return SparseVector(kind.asarray(self.indices), kind.asarray(self.values), self.length)

    def minus(self, other: SparseVector) -> SparseVector:
        """Return self - other, without zeros; both must have the same indices.

        On a GPU, CuPy treats float32 differences below 2^-126 as zeros.
        """
        difference = self.values - other.values
        return self._replace(values=difference).where(difference != 0)

    def index_range(self, first: int, end: int) -> SparseVector:
        """Return the entries with first <= index < end; the arrays are views."""
        # A bound of another dtype would make searchsorted convert all indices. `end` may exceed
        # the dtype, so search for the last index before each bound, for both in one call: on a GPU
        # the host waits for the result.
        last = module_of(self.indices).asarray(np.array([first - 1, end - 1], self.indices.dtype))
        start, stop = self.indices.searchsorted(last, "right").tolist()
        return self.take(slice(start, stop))

    def take(self, positions: slice) -> SparseVector:
        """Return the entries at these positions of the list; the arrays are views."""
        return SparseVector(self.indices[positions], self.values[positions], self.length)

    def embed(self, start: int, length: int) -> SparseVector:
        """Return the same entries in a longer vector, whose element `start` is this one's first."""
        # Convert first: the sum may overflow the shorter vector's index dtype.
        indices = self.indices.astype(index_dtype(length)) + start
        return SparseVector(indices, self.values, length)

    @property
    def entries(self) -> int:
        """Return how many entries there are."""
        return int(self.indices.size)


def require_values(values: Array) -> None:
    """Raise ValueError unless an array is float32 or float64, in this machine's byte order."""
    if not (hasattr(values, "dtype") and values.dtype in VALUE_DTYPES):
        is_on_device(values)  # raises TypeError if it is not an array at all
        raise ValueError(
            f"values must be float32 or float64, got {values.dtype}: "
            ".astype(np.float32) converts them"
        )


def check(vector: SparseVector) -> SparseVector:
    """Return the vector; raise ValueError, with the reason, if it is not a valid SparseVector.

    For vectors from outside: from a caller of `reduce`, or a peer's message. On a GPU it waits for
    the result. Raises TypeError for indices or values that are not an array.
    """
    indices, values, length = vector
    require_values(values)
    if is_on_device(indices) != is_on_device(values):
        raise ValueError("indices and values must both be NumPy's, or both CuPy's")
    if indices.ndim != 1 or indices.shape != values.shape:
        raise ValueError(
            f"indices and values must be one-dimensional and equally long, "
            f"got shapes {indices.shape} and {values.shape}"
        )
    if indices.dtype != index_dtype(length):
        raise ValueError(
            f"indices of a vector of {length} elements must be {index_dtype(length)}, "
            f"got {indices.dtype}"
        )
    # The two ends are the extremes if the indices are sorted, which is checked next.
    if indices.size and not (indices[0] >= 0 and indices[-1] < length):
        raise ValueError(
            f"indices must lie in 0..{length - 1}, got {int(indices.min())}..{int(indices.max())}"
        )
    falls = module_of(indices).flatnonzero(indices[1:] <= indices[:-1])
    if falls.size:
        first = int(falls[0])  # CuPy's scalars are no indices
        before, after = indices[first : first + 2].tolist()
        raise ValueError(f"indices must be strictly increasing, got {before} before {after}")
    return vector


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
    # All of one dtype: kernels get a single format for all arrays.
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
    # Neither NumPy's nor CuPy's arrays are instances of Sequence.
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
    """Raise ValueError unless both arrays have the residual's dtype and shape.

    The one that the new values are written to (`into`, or else `old`) must be writable.
    names: of both arrays, for the error.
    """
    for array, name in zip((old, into), names, strict=True):
        if array is not None and (array.dtype, array.shape) != (residual.dtype, residual.shape):
            raise ValueError(
                f"{name} must be of the residual's dtype and size, {residual.dtype} "
                f"[{residual.size}], got {array.dtype} {list(array.shape)}"
            )
    require_writable(*((old, names[0]) if into is None else (into, names[1])))


def require_writable(array: Array, name: str) -> None:
    """Raise ValueError for an array on the host that is read-only."""
    if not is_on_device(array) and not array.flags.writeable:
        raise ValueError(f"{name} must not be read-only: pass a copy")


def host_parts(residual: Array, *others: Any) -> Sequence[Array]:
    """Return what `gradient_parts` does, for a residual on the host."""
    parts = gradient_parts(residual, *others)
    assert not isinstance(parts, Located)  # those are on a GPU, which gradient_parts refuses
    return parts
