"""The hot loops of NumPy arrays in C++, called through ctypes without holding the interpreter.

Function for function the twins of `reference`, to the bit. One idea, one C++ file:

    keys.hpp      integers in the order of |x|
    sums.cpp      a whole vector in one number
    pool.cpp      a few threads that share a loop
"""

from .sums import all_finite, squared_norm

__all__ = ["all_finite", "squared_norm"]
