"""Environment: the numbers that its variables give. An empty variable is one that is not set."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping


def number(
    variable: str,
    default: float,
    unit: str,
    environ: Mapping[str, str] = os.environ,
    *,
    may_be_zero: bool = False,
) -> float:
    """Return a finite number of `unit`; raise ValueError for one that is not above 0.

    may_be_zero: 0 is a number like others, and means what the variable's page says.
    """
    text = environ.get(variable) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
        least = ", at least 0" if may_be_zero else " above 0"
        raise ValueError(f"{variable} must be a number of {unit}{least}, got {text!r}")
    return value


def whole_number(
    variable: str,
    default: int | None,
    unit: str = "",
    environ: Mapping[str, str] = os.environ,
    *,
    least: int = 1,
) -> int:
    """Return a whole number, of `unit` where it has one; raise ValueError for one below `least`.

    default: what it is without the variable, whatever `least` says; None: the variable is required.
    """
    text = environ.get(variable, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or int(text) < least:
        of = f" of {unit}" if unit else ""
        raise ValueError(f"{variable} must be a whole number{of}, at least {least}, got {text!r}")
    return int(text)
