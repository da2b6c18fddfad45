"""The environment variables that collectives reads. An empty variable counts as unset."""

from __future__ import annotations

import os
from typing import Final

_MOST_DIGITS: Final = 15


def kernels() -> str:
    """Return GTOPK_KERNELS: "reference" for NumPy, "" for C++ where it is built.

    Raises ValueError for anything else.
    """
    value = os.environ.get("GTOPK_KERNELS", "")
    if value not in ("", "reference"):
        raise ValueError(
            f"GTOPK_KERNELS must be 'reference' (NumPy) or unset (C++ where built), got {value!r}"
        )
    return value


def threads() -> int:
    """Return GTOPK_THREADS; 0 where it is unset; raise ValueError for no positive number."""
    return whole_number("GTOPK_THREADS", 0, "threads")


def calibration() -> str:
    """Return GTOPK_CALIBRATION: "off", "fresh", the path of a cache file, or "" where unset."""
    return os.environ.get("GTOPK_CALIBRATION", "")


def whole_number(
    variable: str,
    default: int | None,
    unit: str = "",
    *,
    least: int = 1,
) -> int:
    """Return the variable's whole number; raise ValueError for one below `least`.

    default: returned if the variable is unset, even if below `least`; None: it is required.
    unit:    named in the error.
    """
    text = os.environ.get(variable, "")
    if not text and default is not None:
        return default
    unit_text = f" of {unit}" if unit else ""
    # `int` alone would also take "+4", " 4" and "1_000", and refuse thousands of digits.
    if text.isdecimal() and len(text) > _MOST_DIGITS:
        raise ValueError(
            f"{variable} must be a whole number{unit_text}, of at most {_MOST_DIGITS} digits, got "
            f"{text!r}"
        )
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{variable} must be a whole number{unit_text}, at least {least}, got {text!r}"
        )
    return int(text)
