"""The hot loops: one interface with three implementations, called twins.

`reference` is NumPy, the specification, and the fallback if nothing is compiled. `host` is C++;
`device` is CUDA, for CuPy arrays. Twins give bit-identical results; `_twin` chooses the one for an
array.

`pack_...` encodes indices or values into a uint8 buffer that is large enough. `unpack_...` decodes
bytes from any sender; a ValueError says what is wrong with them. Twins write the same bytes, and
refuse the same ones. The GPU codes indices in blocks, and values in 16 bits or in 2 to 4;
`write_head` and `read_head` are for GPU messages only.

All selections use one order: the larger |value| first, among equals the lower index. NaN counts as
larger than infinity. Zeros are never selected, so there may be fewer than k entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .. import environment
from ..telemetry import profiled
from ..vector import (
    Array,
    Gradient,
    Located,
    Momentum,
    SparseVector,
    is_on_device,
    require_parts,
    require_values,
    require_writable,
)
from . import host, reference
from .host.library import library, load_error
from .narrow import round_to_bfloat16

__all__ = [
    "Gradient",
    "Located",
    "Momentum",
    "accumulate_and_select",
    "add_at",
    "all_finite",
    "checksum",
    "clear",
    "clear_at",
    "contains",
    "in_order",
    "in_use",
    "merge",
    "pack_indices",
    "pack_values",
    "put_at",
    "read_head",
    "select",
    "squared_norm",
    "squared_norms",
    "sum_by_index",
    "unpack_indices",
    "unpack_values",
    "why_not_compiled",
    "write_head",
]


_for_numpy: Final[Any] = (
    reference if environment.kernels() == "reference" or library() is None else host
)


def _twin(array: Array) -> Any:
    """Return the module of the twin for this array; raise TypeError if there is none."""
    # isinstance first, as it is fast: kernels are called some fifty times a step.
    if isinstance(array, np.ndarray) or not is_on_device(array):
        return _for_numpy
    from . import device

    return device


def accumulate_and_select(
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, float]:
    """Add a gradient to `residual` in place and select from the sum, in one pass over memory.

    residual:  float32 or float64 [n]. The selected entries stay in it.
    gradient:  of the residual's dtype, or with float32 residuals float16, or uint16 for the bits
               of bfloat16: [n], or a list of one-dimensional arrays with n elements in all, which
               are not copied.
    threshold: a guess at the k-th largest |value|, 0 for none. It affects the time, never the
               result: pass the one that the last step returned.
    weight:    multiplies the gradient first, in the residual's dtype.
    momentum:  its velocity accumulates the gradient, and is added instead of it.
    into:      memory for the sum, like `residual`, which is then unchanged; None: in place.
    Returns the k largest entries, or all that are not zero if there are fewer, and the threshold
    for the next step. Raises ValueError for arguments that do not fit together, and TypeError for
    anything but NumPy or CuPy arrays; then nothing was changed.
    """
    return _twin(residual).accumulate_and_select(
        residual, gradient, k, threshold, momentum, weight, into
    )


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search.

    dense: float32 or float64 [n], unchanged; the rest as in `accumulate_and_select`, errors too.
    """
    return _twin(dense).select(dense, k, threshold)


def merge(a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b, without zeros.

    (a, b) and (b, a) give the same bits (a NaN's excepted), as an index in both takes a single
    addition. Raises ValueError for k < 1, for vectors of different length or dtypes, and for values
    that are not float32 or float64.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    _require_compatible((a, b))
    with profiled("merge"):
        return _twin(a.values).merge(a, b, k)


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the vectors.

    Raises ValueError for vectors that `merge` refuses.
    """
    _require_compatible(vectors)
    with profiled("merge"):
        return _twin(vectors[0].values).sum_by_index(vectors)


def _require_compatible(vectors: Sequence[SparseVector]) -> None:
    """Raise ValueError unless all have one length and dtype, which C++ and CUDA rely on."""
    for vector in vectors:
        require_values(vector.values)
    lengths = {vector.length for vector in vectors}
    if len(lengths) > 1:
        raise ValueError(
            f"vectors must be of one length, got {' and '.join(map(str, sorted(lengths)))}"
        )
    dtypes = {(vector.values.dtype, vector.indices.dtype) for vector in vectors}
    if len(dtypes) > 1:
        got = sorted(f"{values} at {indices}" for values, indices in dtypes)
        raise ValueError(f"vectors must be of one dtype, got {' and '.join(got)}")


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices`, both sorted: bool [wanted]."""
    return _twin(indices).contains(indices, wanted)


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    _twin(dense).add_at(dense, vector)


def clear_at(dense: Array, indices: Array) -> None:
    """Set the elements of a dense array at these indices to zero."""
    _twin(dense).clear_at(dense, indices)


def clear(dense: Array) -> None:
    """Set all elements of an array on the host to zero.

    A large contiguous one is written past the caches, in half the time of a memset, which first
    reads each cache line.
    """
    _for_numpy.clear(dense)


def put_at(parts: Sequence[Array] | Located, vector: SparseVector) -> None:
    """Set the vector's entries in the arrays that make up the dense vector; the rest is unchanged.

    parts: all of the vector's dtype, or with float32 values float16, or uint16 for the bits of
           bfloat16, to which values are rounded; one-dimensional, with `length` elements in all.
    """
    if isinstance(parts, Located) or _twin(parts[0]) is not _for_numpy:
        from . import device

        device.put_at(parts, vector)
        return
    # NumPy suffices on the host: an update has few entries.
    require_parts(parts, vector.values.dtype, vector.length, "the parts must be of the vector's")
    for part in parts:
        require_writable(part, "a part")
    bits = parts[0].dtype == np.uint16
    values = round_to_bfloat16(vector.values) if bits else vector.values
    starts = np.cumsum([0, *(part.size for part in parts)])
    ends = np.searchsorted(vector.indices, starts.astype(vector.indices.dtype))
    with np.errstate(over="ignore"):  # values beyond float16 become infinity, as in a cast
        for part, start, a, b in zip(parts, starts, ends, ends[1:], strict=False):
            part[vector.indices[a:b] - start] = values[a:b]


def all_finite(array: Array) -> bool:
    """Tell whether a one-dimensional array holds neither NaN nor infinity.

    array: float32, float64, float16, or uint16 for the bits of bfloat16.
    """
    return _twin(array).all_finite(array)


def squared_norm(array: Array) -> float:
    """Return the sum of squares of a one-dimensional array, added up in float64.

    array: float32 or float64; on a GPU also float16, or uint16 for the bits of bfloat16.
    """
    return _twin(array).squared_norm(array)


def squared_norms(arrays: Sequence[Array] | Located) -> list[float]:
    """Return `squared_norm` of each array; arrays on a GPU, of one dtype, share a launch."""
    if not isinstance(arrays, Located) and not is_on_device(arrays[0]):
        return [squared_norm(array) for array in arrays]
    from . import device

    return device.squared_norms(arrays)


def checksum(data: Array, seed: int = 0) -> int:
    """Return a 64-bit checksum of `data` (uint8 [n]); seed: that of the bytes before it."""
    return _twin(data).checksum(data, seed)


def write_head(message: Array, head: Array) -> None:
    """Write 56 bytes of the host, then an 8-byte checksum, to the front of a GPU message.

    The checksum covers the rest of the message, seeded with that of the 56 bytes. Asynchronous.
    """
    _twin(message).write_head(message, head)


def read_head(message: Array) -> tuple[Array, int]:
    """Return a GPU message's first 64 bytes on the host, and the checksum it should have."""
    return _twin(message).read_head(message)


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length."""
    return _twin(indices).in_order(indices, length)


def pack_indices(indices: Array, length: int, out: Array, code: str) -> int:
    """Encode indices, int32 or int64 [k], as "blocks" or "rice"; return the bytes taken."""
    return _twin(indices).pack_indices(indices, length, out, code)


def unpack_indices(data: Array, count: int, length: int, code: str) -> tuple[Array, int]:
    """Decode `count` indices, int32 or int64; return them and how many bytes they took."""
    return _twin(data).unpack_indices(data, count, length, code)


def pack_values(values: Array, out: Array, code: str) -> int:
    """Encode values, float32 or float64 [k]; `out` has exactly their bytes. Return the exponent."""
    return _twin(values).pack_values(values, out, code)


def unpack_values(data: Array, count: int, exponent: int, dtype: Any, code: str) -> Array:
    """Decode values, of the dtype, [count]."""
    return _twin(data).unpack_values(data, count, exponent, dtype, code)


def in_use() -> str:
    """Return the name of the kernels that work on NumPy arrays."""
    if _for_numpy is reference:
        return "NumPy reference"
    return f"C++ core, {_for_numpy.instructions()}"


def why_not_compiled() -> str:
    """Return why the C++ core is not in use; "" when it is."""
    if _for_numpy is not reference:
        return ""
    return load_error() or "GTOPK_KERNELS=reference asks for NumPy"
