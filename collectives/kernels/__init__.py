"""The few hot loops, behind one interface.

`reference` is NumPy: the truth for tests, and what runs where nothing is compiled. A compiled
twin of these functions takes its place here, function for function.
"""

from .reference import (
    accumulate_and_select,
    add_at,
    all_finite,
    contains,
    merge,
    select,
    sum_by_index,
)

__all__ = [
    "accumulate_and_select",
    "add_at",
    "all_finite",
    "contains",
    "in_use",
    "merge",
    "select",
    "sum_by_index",
]


def in_use() -> str:
    """Return the name of the kernels that these functions come from."""
    return "NumPy reference"
