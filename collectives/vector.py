"""SparseVector: the one data type between select and apply."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

VALUE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


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


class SparseVector(NamedTuple):
    """The nonzero entries of a vector of `length` elements.

    indices: int32 (int64 from 2^31 elements on) [k], strictly increasing, in 0..length-1.
    values:  float32 or float64 [k], in the order of the indices.

    Both are NumPy's arrays, or both CuPy's.

    Functions take it and return it; none of them changes the arrays of its arguments.
    """

    indices: Array
    values: Array
    length: int

    @classmethod
    def empty(
        cls, length: int, dtype: np.dtype[Any] | type = np.float32, like: Array | None = None
    ) -> SparseVector:
        """Return the vector of zeros; its arrays are of the kind of `like`, or NumPy's."""
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
        """Return the entries whose position in `indices` is true in `mask` (bool [k])."""
        # By positions: with a mask NumPy branches on every entry, unpredictably, and twice.
        positions = module_of(mask).flatnonzero(mask)
        return SparseVector(self.indices[positions], self.values[positions], self.length)

    def on_host(self) -> SparseVector:
        """Return the vector with NumPy arrays: itself, or from a GPU a copy that was waited for."""
        if isinstance(self.values, np.ndarray):
            return self
        return SparseVector(self.indices.get(), self.values.get(), self.length)

    def beside(self, array: Array) -> SparseVector:
        """Return a vector of NumPy arrays with arrays of the kind of `array`, copied if need be."""
        kind = module_of(array)
        return SparseVector(kind.asarray(self.indices), kind.asarray(self.values), self.length)

    def minus(self, other: SparseVector) -> SparseVector:
        """Return the nonzero differences to a vector of the same indices.

        On a GPU, CuPy treats float32 differences below 2^-126 as zeros.
        """
        difference = self.values - other.values
        return self._replace(values=difference).where(difference != 0)

    def index_range(self, first: int, end: int) -> SparseVector:
        """Return the entries with first <= index < end; the arrays are views."""
        # Of the indices' own dtype (`end` may be one more than that can count): else all indices
        # would be converted first. Both at once: on a GPU the host waits for the answer.
        last = module_of(self.indices).asarray(np.array([first - 1, end - 1], self.indices.dtype))
        start, stop = self.indices.searchsorted(last, "right").tolist()
        return self.take(slice(start, stop))

    def take(self, positions: slice) -> SparseVector:
        """Return the entries at these positions of the list; the arrays are views."""
        return SparseVector(self.indices[positions], self.values[positions], self.length)

    def embed(self, start: int, length: int) -> SparseVector:
        """Return the same entries in a longer vector that has this one from `start` on."""
        # Converted first: the sum may be more than the indices' own dtype can hold.
        indices = self.indices.astype(index_dtype(length)) + start
        return SparseVector(indices, self.values, length)

    @property
    def entries(self) -> int:
        """Return how many entries there are."""
        return int(self.indices.size)


def require_values(values: Array) -> None:
    """Raise ValueError unless an array is float32 or float64, in this machine's byte order."""
    if not (hasattr(values, "dtype") and values.dtype in VALUE_DTYPES):
        is_on_device(values)  # raises TypeError for what is no array
        raise ValueError(
            f"values must be float32 or float64, got {values.dtype}: "
            ".astype(np.float32) converts them"
        )


def check(vector: SparseVector) -> SparseVector:
    """Return the vector; raise ValueError, with the reason, where it is not a valid SparseVector.

    It is for vectors from outside: from a caller of `reduce`, or a peer's message. On a GPU it
    waits for the result. Raises TypeError for what is no array.
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
    # Only the two ends, for a start: they are the extremes if the order, examined next, holds.
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
