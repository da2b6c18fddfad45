"""Format numbers for people: three digits, and a no-break space before the unit."""

from __future__ import annotations

import math
from collections.abc import Callable

SPACE = "\N{NO-BREAK SPACE}"
BANDWIDTHS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def count_text(value: float) -> str:
    """Return 85002 as "85,002"."""
    return f"{value:,.0f}"


def with_article(noun: str) -> str:
    """Return "step" as "a step", and "outer step" as "an outer step"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def bytes_text(value: float, count: int = 3) -> str:
    """Return 20400 as "20.4 kB" (decimal units), with `count` digits."""
    return scaled(value, ("B", "kB", "MB", "GB", "TB"), lambda each: digits(each, count))


def bandwidth_text(bits_per_second: float) -> str:
    """Return 2.3e9 as "2.30 Gbit/s"."""
    return scaled(bits_per_second, BANDWIDTHS)


def about_bandwidth_text(bits_per_second: float) -> str:
    """Return 2.345e9 as "about 2.3 Gbit/s": measured times give no more than two digits."""
    return f"about{SPACE}{rough_bandwidth_text(bits_per_second)}"


def rough_bandwidth_text(bits_per_second: float) -> str:
    """Return 2.345e9 as "2.3 Gbit/s"."""
    return scaled(float(f"{bits_per_second:.1e}"), BANDWIDTHS, "{:g}".format)


def seconds_text(value: float, count: int = 3) -> str:
    """Return 0.0023 as "2.30 ms", with `count` digits."""
    return scaled(value * 1e6, ("µs", "ms", "s"), lambda each: digits(each, count))


def duration_text(seconds: float) -> str:
    """Return 2.3 as "2.30 s", and 90000 as "25 h"."""
    return seconds_text(seconds) if seconds < 10_000 else f"{digits(seconds / 3600)}{SPACE}h"


def digits(value: float, count: int = 3) -> str:
    """Return `value` with `count` digits and no exponent: 10 as "10", 0.00123 as "0.0012"."""
    # A rounding error of float arithmetic must not turn "10" into "10.0".
    if round(value, count + 3) == round(value):
        return f"{value:,.0f}"
    # From the rounded text, not from log10: 9.999 has three digits as 10.0, one decimal fewer.
    power = int(f"{value:.{count - 1}e}".partition("e")[2])
    if power < -1:
        return f"{value:.{count - 2 - power}f}".rstrip("0")
    return f"{value:,.{max(0, count - 1 - max(0, power))}f}"


def scaled(value: float, units: tuple[str, ...], written: Callable[[float], str] = digits) -> str:
    """Return `value` formatted by `written`, in the largest of `units` (1000 apart) that fits.

    Infinity, such as the bandwidth of a link that takes no time, becomes "infinite".
    """
    if math.isinf(value):
        return f"infinite{SPACE}{units[0]}"
    # The logarithm of a power of 1000 may fall just short of a whole number.
    power = int(math.log10(abs(value)) / 3 + 1e-9) if abs(value) >= 1 else 0
    power = min(power, len(units) - 1)
    return f"{written(value / 1000**power)}{SPACE}{units[power]}"


def percent_text(share: float) -> str:
    """Return 0.9644 as "96.4 %"."""
    return f"{100 * share:.1f}{SPACE}%"


def points_text(share: float) -> str:
    """Return a difference of -0.003 in percentage points, as "-0.3 points"."""
    return f"{100 * share:+.1f} points".replace("-", "\N{MINUS SIGN}")
