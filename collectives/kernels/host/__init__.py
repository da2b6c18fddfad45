"""The hot loops for NumPy arrays in C++, called through ctypes without holding the GIL.

Each function is the bit-identical twin of one in `reference`. The C++ files:

    scan*.cpp      the loop over all elements, for each instruction set
    gradient.hpp   the addends: one array or many, 16 bits or more, with momentum
    candidates.hpp, ranking.hpp, select.cpp   from the few candidates to the k largest
    merge.cpp, scatter.cpp, sums.cpp          sparse vectors, updates of dense ones, reductions
    code*.cpp, scale.hpp                      the wire's codes: these only detect malformed bytes,
                                              and the reference raises the error
    keys.hpp, pool.hpp, abi.hpp               integers ordered like |x|; threads; C names
    stream.hpp     writes past the caches
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ...cores import default_threads, requested_threads
from ...vector import (
    Array,
    Gradient,
    Momentum,
    SparseVector,
    host_parts,
    index_dtype,
    require_selectable,
)
from .. import reference, reference_indices
from .library import instructions  # noqa: F401 - of this twin, too
from .library import library as _library

POINTER: Final = ctypes.c_void_p
COUNT: Final = ctypes.c_int64


# The suffixes of C names, by dtype (in native byte order only).
_SUFFIXES: Final = {
    np.dtype(np.float16): "f16",
    np.dtype(np.uint16): "bf16",
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}


class _ByDtype(dict[object, Callable[..., int]]):
    """A C function's instances, by the dtype of the arrays, or those of values and of indices."""

    def __missing__(self, key: object) -> Callable[..., int]:
        dtypes = " at ".join(map(str, key if isinstance(key, tuple) else [key]))
        raise ValueError(
            f"the C++ core has no kernel for {dtypes}: convert values with .astype(np.float32), "
            "indices with .astype(np.int32)"
        )


_byte: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer
_address: Final = ctypes.addressof


def address(array: Array) -> int:
    """Return the address of a contiguous array's data; the caller keeps the array alive."""
    try:
        return _address(_byte(array))  # three times as fast as array.ctypes.data
    except (TypeError, ValueError):  # read-only, or empty
        return array.ctypes.data


def packed(array: Array) -> Array:
    """Return the array, or a copy if it is not contiguous or not aligned."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array
    return np.array(array, order="C")


def _entry(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Return a C function; None if there is none, or no library (`library.load_error` says why)."""
    entry = getattr(_library(), name, None)
    if entry is not None:
        entry.argtypes, entry.restype = arguments, result
    return entry


def function(name: str, *arguments: Any) -> _ByDtype:
    """Return the C function `name`, for every dtype or pair of dtypes that it exists for."""
    keys: dict[object, str] = {
        (values, indices): f"{_SUFFIXES[values]}_{_SUFFIXES[indices]}"
        for values, indices in itertools.product(_SUFFIXES, repeat=2)
    }
    found = _ByDtype()
    for key, suffix in (_SUFFIXES | keys).items():
        if entry := _entry(f"{name}_{suffix}", COUNT, arguments):
            found[key] = entry
    return found


def check_memory(result: int) -> int:
    """Return the result of a C function that allocates; raise MemoryError if that failed."""
    if result < 0:
        raise MemoryError("the C++ core ran out of memory")
    return result


def threads() -> int:
    """Return how many threads a loop may use now."""
    return requested_threads.get() or default_threads()


# ---- select, in one pass over memory

_select = function(
    "select",
    *(POINTER, POINTER, COUNT),  # before, dense
    *(POINTER, POINTER, ctypes.c_int32, ctypes.c_double),  # gradient, its weight
    *(POINTER, POINTER, ctypes.c_double),  # velocity, where it goes, momentum
    *(COUNT, ctypes.c_double, ctypes.c_int),  # k, threshold, threads
    *(POINTER, POINTER, POINTER),  # indices, values, report
)

# The enum Format in gradient.hpp, by the dtype of the gradient's arrays.
_SAME: Final = 0  # the residual's dtype, as `host_parts` has checked
_FORMATS: Final = {
    np.dtype(np.float32): _SAME,
    np.dtype(np.float64): _SAME,
    np.dtype(np.float16): 1,
    np.dtype(np.uint16): 2,
}
_NO_GRADIENT: Final = (None, None, _SAME, 1.0, None, None, 0.0)


class Report(ctypes.Structure):
    """Statistics of a search; scans: passes over the vector, above 1 if the threshold misled."""

    _fields_ = (("next_threshold", ctypes.c_double), ("scans", COUNT))

    next_threshold: float
    scans: int


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search."""
    require_selectable(dense, k)
    dense = packed(dense)
    picked, report = _search(dense, dense, _NO_GRADIENT, k, threshold)
    return picked, report.next_threshold


def accumulate_and_select(*arguments: Any, **options: Any) -> tuple[SparseVector, float]:
    """Do what `search` does; return the next threshold instead of the report."""
    picked, report = search(*arguments, **options)
    return picked, report.next_threshold


def search(
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, Report]:
    """Add to `residual`, in place or into other memory, and select from the sum.

    After a MemoryError the gradient was added as a whole, or not at all, if all arrays are
    contiguous.
    """
    # These must stay alive during the call: C++ gets only their addresses.
    parts = [packed(part) for part in host_parts(residual, gradient, k, momentum, into)]
    sums = residual if into is None else into
    touched = [residual, sums]
    if momentum is not None:
        new_velocity = momentum.velocity if momentum.into is None else momentum.into
        touched += [momentum.velocity, new_velocity]
    if not all(array.flags.carray for array in touched):
        picked, next_threshold, scans = reference.search(
            residual, parts, k, threshold, momentum, weight, into
        )
        return picked, Report(next_threshold, scans)
    count = len(parts)
    arrays = (POINTER * count)(*map(address, parts))
    lengths = (COUNT * count)(*[part.size for part in parts])
    addends = (
        ctypes.addressof(arrays),
        ctypes.addressof(lengths),
        _FORMATS[parts[0].dtype],
        weight,
        *(
            (None, None, 0.0)
            if momentum is None
            else (address(momentum.velocity), address(new_velocity), momentum.factor)
        ),
    )
    return _search(residual, sums, addends, k, threshold)


def _search(
    before: Array, dense: Array, addends: tuple[object, ...], k: int, threshold: float
) -> tuple[SparseVector, Report]:
    indices = np.empty(k, index_dtype(dense.size))
    values = np.empty(k, dense.dtype)
    report = Report()
    found = check_memory(
        _select[dense.dtype, indices.dtype](
            *(address(before), address(dense), dense.size, *addends, k, threshold, threads()),
            *(address(indices), address(values), ctypes.addressof(report)),
        )
    )
    return SparseVector(indices[:found], values[:found], dense.size), report


# ---- sparse vectors, and reductions of dense ones

_merge = function("merge", *(POINTER, POINTER, COUNT) * 2, COUNT, POINTER, POINTER)
_sum_by_index = function("sum_by_index", *(POINTER,) * 3, COUNT, POINTER, POINTER)
_contains = function("contains", *(POINTER, COUNT) * 2, POINTER)
_add_at = function("add_at", POINTER, COUNT, POINTER, POINTER, COUNT)
_clear_at = function("clear_at", POINTER, COUNT, POINTER, COUNT)
_clear_bytes: Any = _entry("clear_bytes", None, (POINTER, COUNT))


def clear(dense: Array) -> None:
    """Set all elements of an array to zero."""
    if not dense.flags.carray:
        reference.clear(dense)
        return
    _clear_bytes(address(dense), dense.nbytes)


# C++ stores whole SIMD vectors of entries: room for that after the last (the same in scan.hpp).
SLACK = 16


def merge(a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b."""
    a_indices, a_values, b_indices, b_values = map(packed, (*a[:2], *b[:2]))
    room = a_indices.size + b_indices.size
    indices = np.empty(room + SLACK, a_indices.dtype)
    values = np.empty(room + SLACK, a_values.dtype)
    kept = check_memory(
        _merge[values.dtype, indices.dtype](
            *(address(a_indices), address(a_values), a_indices.size),
            *(address(b_indices), address(b_values), b_indices.size),
            # `min`, as k may exceed 64 bits.
            *(min(k, room), address(indices), address(values)),
        )
    )
    return SparseVector(indices[:kept], values[:kept], a.length)


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    lists = [(packed(vector.indices), packed(vector.values)) for vector in vectors]
    counts = [indices.size for indices, _ in lists]
    first = vectors[0]
    indices = np.empty(sum(counts) + SLACK, first.indices.dtype)
    values = np.empty(indices.size, first.values.dtype)
    number = len(lists)
    found = check_memory(
        _sum_by_index[values.dtype, indices.dtype](
            (POINTER * number)(*[address(part) for part, _ in lists]),
            (POINTER * number)(*[address(part) for _, part in lists]),
            (COUNT * number)(*counts),
            *(number, address(indices), address(values)),
        )
    )
    return SparseVector(indices[:found], values[:found], first.length)


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    # C++ has a function for each dtype, but not for pairs.
    indices, wanted = packed(indices), packed(wanted.astype(indices.dtype, copy=False))
    found = np.empty(wanted.size, np.bool_)
    _contains[indices.dtype](
        *(address(indices), indices.size, address(wanted), wanted.size, address(found)),
    )
    return found


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    if not dense.flags.carray or dense.dtype != vector.values.dtype:
        reference.add_at(dense, vector)
        return
    indices, values = packed(vector.indices), packed(vector.values)
    add = _add_at[dense.dtype, indices.dtype]
    if not add(address(dense), dense.size, address(indices), address(values), indices.size):
        raise _out_of_range(dense, indices)


def clear_at(dense: Array, indices: Array) -> None:
    """Set the elements of a dense array at these indices to zero."""
    if not dense.flags.carray:
        reference.clear_at(dense, indices)
        return
    indices = packed(indices)
    clear = _clear_at[dense.dtype, indices.dtype]
    if not clear(address(dense), dense.size, address(indices), indices.size):
        raise _out_of_range(dense, indices)


def _out_of_range(dense: Array, indices: Array) -> IndexError:
    return IndexError(
        f"indices must lie in 0..{dense.size - 1}, got {int(indices[0])}..{int(indices[-1])}"
    )


_all_finite = function("all_finite", POINTER, COUNT)
_squared_norm = function("squared_norm", POINTER, COUNT, ctypes.c_int, POINTER)


def all_finite(array: Array) -> bool:
    """Tell whether every element is finite."""
    array = packed(array)
    return bool(_all_finite[array.dtype](address(array), array.size))


def squared_norm(array: Array) -> float:
    """Return the sum of squares, added in the reference's order."""
    array = packed(array)
    norm = ctypes.c_double()
    count = _squared_norm[array.dtype]
    check_memory(count(address(array), array.size, threads(), ctypes.addressof(norm)))
    return norm.value


# ---- the wire's codes

_checksum: Final[Any] = _entry("code_checksum", ctypes.c_uint64, (POINTER, COUNT, ctypes.c_uint64))
_in_order: Final = function("code_in_order", POINTER, COUNT, COUNT)
_INDEX_CODES: Final = ("blocks", "rice")
_VALUE_CODES: Final = ("bf16", "fp16", "int8", "int4", "int3", "int2")
_PACK_INDICES: Final = {
    code: function(f"code_pack_{code}", POINTER, COUNT, COUNT, POINTER) for code in _INDEX_CODES
}
_UNPACK_INDICES: Final = {
    code: function(f"code_unpack_{code}", POINTER, COUNT, COUNT, COUNT, POINTER)
    for code in _INDEX_CODES
}
_PACK_VALUES: Final = {
    code: function(f"code_pack_{code}", POINTER, COUNT, POINTER) for code in _VALUE_CODES
}
_UNPACK_VALUES: Final = {
    code: function(f"code_unpack_{code}", POINTER, COUNT, COUNT, POINTER) for code in _VALUE_CODES
}


def checksum(data: Array, seed: int = 0) -> int:
    """Return a 64-bit checksum of `data` (uint8 [n]); seed: that of the bytes before it."""
    return _checksum(address(data), data.size, seed)


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length."""
    return bool(_in_order[indices.dtype](address(indices), indices.size, length))


def pack_indices(indices: Array, length: int, out: Array, code: str) -> int:
    """Write indices, int32 or int64 [k], into `out` (uint8); return the bytes taken."""
    indices = packed(indices)
    pack = _PACK_INDICES[code][indices.dtype]
    return pack(address(indices), indices.size, length, address(out))


def unpack_indices(data: Array, count: int, length: int, code: str) -> tuple[Array, int]:
    """Return the indices, int32 or int64 [count], and how many bytes of `data` they took."""
    # An entry takes at least a bit: do not allocate more for a false count.
    indices = np.empty(min(count, 8 * data.size), index_dtype(length))
    used = -1
    if indices.size == count:
        unpack = _UNPACK_INDICES[code][indices.dtype]
        used = unpack(address(data), data.size, count, length, address(indices))
    if used < 0:
        # The reference refuses the same bytes, and raises an error with the reason.
        reference_indices.unpack_indices(data, count, length, code)
        raise AssertionError(f"the twins of unpack_indices differ on {code}")
    return indices, used


def pack_values(values: Array, out: Array, code: str) -> int:
    """Write values, float32 or float64 [k]; return their exponent."""
    values = packed(values)
    return _PACK_VALUES[code][values.dtype](address(values), values.size, address(out))


def unpack_values(data: Array, count: int, exponent: int, dtype: np.dtype[Any], code: str) -> Array:
    """Return the values, of the dtype, [count]."""
    values = np.empty(count, dtype)
    _UNPACK_VALUES[code][values.dtype](address(data), count, exponent, address(values))
    return values
