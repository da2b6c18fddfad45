"""The CUDA sources: which kernels there are, for which types, and each file as one text.

Includes are inlined, since CuPy's cache of compiled kernels is keyed by the source text alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

FOLDER: Final = Path(__file__).parent

# A fused multiply-add rounds once, while NumPy rounds twice.
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
    arguments = (str(each) if isinstance(each, int) else TYPES[each] for each in parameters)
    return f"{kernel}<{', '.join(arguments)}>"


@functools.cache
def text(file: str) -> str:
    """Return a source with its includes inlined, each file once."""
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
