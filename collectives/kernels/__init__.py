"""The few hot loops: one contract, and the twins that keep it.

`reference` is NumPy: the truth for tests, and what runs where nothing is compiled. `host` is C++.
Twins give the same results to the bit; which one works on an array is decided in `_twin` alone.

An order holds throughout: the larger |value| first, among equals the lower index. NaN counts as
larger than infinity; exact zeros are never selected, so fewer than k entries may come out.
"""

from __future__ import annotations

import os
from typing import Any, Final

from ..vector import Array
from . import reference
from .host.library import absence, library

__all__ = [
    "accumulate_and_select",
    "add_at",
    "all_finite",
    "contains",
    "in_use",
    "merge",
    "select",
    "squared_norm",
    "sum_by_index",
    "why_not_compiled",
]


def _choose() -> Any:
    wanted = os.environ.get("GTOPK_KERNELS", "")
    if wanted not in ("", "reference"):
        raise ValueError(
            f"GTOPK_KERNELS must be 'reference' (NumPy) or unset (C++ where built), got {wanted!r}"
        )
    if wanted == "reference" or library() is None:
        return reference
    from . import host

    return host


_for_numpy: Final = _choose()


accumulate_and_select = reference.accumulate_and_select
add_at = reference.add_at
contains = reference.contains
merge = reference.merge
select = reference.select
sum_by_index = reference.sum_by_index


def all_finite(array: Array) -> bool:
    """Tell whether a one-dimensional array holds neither NaN nor infinity."""
    return bool(_for_numpy.all_finite(array))


def squared_norm(array: Array) -> float:
    """Return the sum of squares of a one-dimensional array, in float64."""
    return float(_for_numpy.squared_norm(array))


def in_use() -> str:
    """Return the name of the kernels that these functions come from."""
    return "NumPy reference" if _for_numpy is reference else "C++ core"


def why_not_compiled() -> str:
    """Return why the C++ core is not in use; "" when it is."""
    if _for_numpy is not reference:
        return ""
    return absence() or "GTOPK_KERNELS=reference asks for NumPy"
