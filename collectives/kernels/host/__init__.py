"""The hot loops of NumPy arrays in C++, called through ctypes without holding the interpreter.

Function for function the twins of `reference`, to the bit. One idea, one C++ file:

    scan*.cpp      the loop over all elements, for each set of instructions
    gradient.hpp   the addends: one array or many, 16 bits or more, with momentum
    candidates.hpp, ranking.hpp, select.cpp   from the few entries found to the k largest
    merge.cpp, scatter.cpp, sums.cpp          sparse lists, their way into dense vectors, sums
    code*.cpp, scale.hpp                      the wire's codes
    keys.hpp, pool.hpp, abi.hpp               integers in the order of |x|; threads; C names
    stream.hpp     writes of vectors that no cache holds
"""

from ..reference import put_at
from . import codes
from .entries import (
    add_at,
    all_finite,
    clear,
    clear_at,
    contains,
    merge,
    squared_norm,
    sum_by_index,
)
from .library import instructions
from .selection import accumulate_and_select, select

__all__ = [
    "accumulate_and_select",
    "add_at",
    "all_finite",
    "clear",
    "clear_at",
    "codes",
    "contains",
    "instructions",
    "merge",
    "put_at",
    "select",
    "squared_norm",
    "sum_by_index",
]
