"""Format numbers for people, and parse those that people write: 1gbit, 12.5GB/s, 0.4ms, 25.6M.

Formatted numbers have three digits, and a no-break space before the unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Final

SPACE = "\N{NO-BREAK SPACE}"
BANDWIDTHS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def count_text(value: float) -> str:
    """Return 85002 as "85,002"."""
    return f"{value:,.0f}"


def plural(noun: str) -> str:
    """Return "step" as "steps", and "mega-batch" as "mega-batches"."""
    return f"{noun}{'es' if noun.endswith('tch') else 's'}"


def counted(number: int, noun: str) -> str:
    """Return 1 and "step" as "1 step", and 1000 as "1,000 steps"."""
    return f"{count_text(number)} {noun if number == 1 else plural(noun)}"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return the first names as text, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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


# Commas and underscores between groups of three digits only: 1,5 is no 15.
_NUMBER: Final = r"(?P<number>(?:\d+|\d{1,3}(?:[_,]\d{3})+)(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)"
_BANDWIDTH: Final = re.compile(
    rf"{_NUMBER}\s*(?P<prefix>[kKmMgGtT]?)(?P<binary>i?)"
    r"(?P<unit>(?i:bits?|bytes?)|b|B)(?:/s|(?i:ps)|(?i:/sec))?"
)
_DURATION: Final = re.compile(rf"{_NUMBER}\s*(?P<unit>ns|us|µs|μs|ms|s)")
_COUNT: Final = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kKmMgGbB]?)")

# Beyond, sums and quotients of times leave the range of a float.
_SLOWEST, _FASTEST = 1.0, 1e18  # bits a second
_LONGEST: Final = 1e9  # seconds
_MOST: Final = 1e30  # of a count

_PREFIXES: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def bandwidth(text: str) -> float:
    """Return bits per second of "1gbit", "100Mbit/s", "10Gbps" or "12.5GB/s"."""
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be a rate such as 1gbit, 100Mbit/s or 12.5GB/s, got {text!r}")
    unit = found["unit"]
    bits = 8 if unit == "B" or unit.lower().startswith("byte") else 1
    base = 1024.0 if found["binary"] else 1000.0
    rate = _number(found["number"]) * bits * base ** _PREFIXES[found["prefix"].lower()]
    if not _SLOWEST <= rate <= _FASTEST:
        raise ValueError(f"must be at least 1bit and at most {_FASTEST / 1e9:g}gbit, got {text!r}")
    return rate


def duration(text: str) -> float:
    """Return seconds of "0.4ms", "30us" or "2s"."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be a time such as 0.4ms or 30us, got {text!r}")
    seconds = _number(found["number"]) * _SECONDS[found["unit"]]
    if seconds > _LONGEST:
        raise ValueError(f"must be at most {_LONGEST:g}s, got {text!r}")
    return seconds


def count(text: str) -> int:
    """Return the number in "25557032", "25,557,032", "25.6M" or "1.3B"."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be a number such as 25557032 or 25.6M, got {text!r}")
    # Exact, by Decimal: in floats 8.2M is 8,199,999.999999999, and not whole.
    times = _COUNTS[found["prefix"].lower()]
    # First in floats, whose range ends at infinity: Decimal would raise for such an exponent.
    if (rough := _number(found["number"]) * times) < 1.0:
        raise ValueError(f"must be at least 1, got {text!r}")
    if rough > _MOST:
        raise ValueError(f"must be at most {_MOST:g}, got {text!r}")
    exact = Decimal(_plain(found["number"])) * times
    if exact != exact.to_integral_value():
        raise ValueError(f"must be whole, got {text!r}")
    return int(exact)


def _number(text: str) -> float:
    return float(_plain(text))


def _plain(text: str) -> str:
    return text.replace("_", "").replace(",", "")
