"""The CUDA sources: which kernels there are, for which types, and each as one self-contained text.

The compiler gets texts with their includes inserted, so that the cache's key of a compiled kernel
depends on every line of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

FOLDER: Final = Path(__file__).parent

# A fused multiply-add rounds once where NumPy rounds twice.
OPTIONS: Final = ("-std=c++17", "--fmad=false")

THREADS: Final = 256  # of every block, as in block.cuh

FILES: Final = {
    "add_at": "entries.cu",
    "begin": "begin.cu",
    "checksum": "checksum.cu",
    "clear_at": "entries.cu",
    "collect": "collect.cu",
    "contains": "contains.cu",
    "count": "count.cu",
    "count_blocks": "offsets.cu",
    "expand": "expand.cu",
    "find_disorder": "order.cu",
    "find_largest": "largest.cu",
    "find_nonfinite": "finite.cu",
    "interleave": "interleave.cu",
    "mark": "mark.cu",
    "pack_few_bits": "few_bits.cu",
    "pack_offsets": "offsets.cu",
    "put_at": "put.cu",
    "remark": "remark.cu",
    "round_values": "cast.cu",
    "search_level": "search.cu",
    "split": "split.cu",
    "sum_runs": "sum_runs.cu",
    "sum_squares": "norm.cu",
    "unpack_few_bits": "few_bits.cu",
    "unpack_offsets": "offsets.cu",
    "widen_values": "cast.cu",
}

# NumPy has no bfloat16; its bits are uint16.
TYPES: Final = {
    np.dtype(np.float16): "Half",
    np.dtype(np.uint16): "Bfloat",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
}


def instance(kernel: str, *parameters: np.dtype[Any] | int) -> str:
    """Return a kernel's name with its template's arguments: dtypes and integers."""
    words = [
        str(parameter) if isinstance(parameter, int) else TYPES[parameter]
        for parameter in parameters
    ]
    return f"{kernel}<{', '.join(words)}>"


@functools.cache
def text(file: str) -> str:
    """Return a source with what it includes, each file once."""
    seen: set[str] = set()

    def lines(name: str) -> Iterator[str]:
        for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
            included = re.match(r'#include "(.+)"', line)
            if included is None:
                if line != "#pragma once":
                    yield line
            elif included[1] not in seen:
                seen.add(included[1])
                yield from lines(included[1])

    return "\n".join(lines(file)) + "\n"


def instances() -> list[str]:
    """Return every kernel in every type that the functions here launch."""
    reals: list[np.dtype[Any]] = [np.dtype(np.float32), np.dtype(np.float64)]
    indices: list[np.dtype[Any]] = [np.dtype(np.int32), np.dtype(np.int64)]
    narrow: list[np.dtype[Any]] = [np.dtype(np.float16), np.dtype(np.uint16)]
    names = [
        instance("mark", real, gradient, sources)
        for real, gradients in ((reals[0], [*narrow, reals[0]]), (reals[1], [reals[1]]))
        for gradient in gradients
        for sources in (0, 1, 2)
        # Without a gradient its dtype says nothing: one kernel serves all.
        if sources or gradient == real
    ]
    names += [
        instance("put_at", real, index, element)
        for real, elements in ((reals[0], [*narrow, reals[0]]), (reals[1], [reals[1]]))
        for element in elements
        for index in indices
    ]
    for kernel in ("begin", "count", "find_largest", "remark", "search_level"):
        names += [instance(kernel, real) for real in reals]
    for kernel in ("find_nonfinite", "sum_squares"):
        names += [instance(kernel, dtype) for dtype in (*narrow, *reals)]
    for kernel in (
        "add_at",
        "clear_at",
        "collect",
        "expand",
        "interleave",
        "split",
        "sum_runs",
    ):
        names += [instance(kernel, real, index) for real in reals for index in indices]
    for kernel in ("contains", "count_blocks", "find_disorder", "pack_offsets", "unpack_offsets"):
        names += [instance(kernel, index) for index in indices]
    for kernel in ("round_values", "widen_values"):
        names += [instance(kernel, dtype, real) for dtype in narrow for real in reals]
    for kernel in ("pack_few_bits", "unpack_few_bits"):
        names += [instance(kernel, real, bits) for real in reals for bits in (4, 3, 2)]
    return sorted([*names, "checksum"])
