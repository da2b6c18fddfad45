"""The grammar of the subcommands of `gtopk`, and the types of their arguments.

Quantities as people write them: 1gbit, 12.5GB/s, 0.4ms, 25.6M; or a well-known model's name.

The models are torchvision's and Hugging Face's, heads included.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

from ..runtime.launch import launched_by

T = TypeVar("T")


def fail(command: str, reason: object, code: int = 1) -> int:
    """Print on stderr why a command cannot go on, and return its exit code."""
    print(f"gtopk {command}: {reason}", file=sys.stderr)
    return code


def as_argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return `read` with its ValueError turned into argparse's error."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


class Command(argparse.ArgumentParser):
    """The parser of a subcommand; its help ends with an example of a call."""

    def __init__(self, call: str, description: str, example: str, **more: Any) -> None:
        """call: how it is called, such as "gtopk plan"."""
        super().__init__(
            prog=call,
            # The formatter wraps options only, and leaves the example as it is.
            description=textwrap.fill(description, 80),
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **more,
        )

    def option(
        self, name: str, read: Callable[[str], Any] | None, default: Any, help: str, **more: Any
    ) -> None:
        """Add an option whose help tells its default, unless that is None.

        read: converts the text, and raises ValueError where it is wrong; None: it stays a text.
        """
        if default is not None and "default" not in help:
            help += "; default: %(default)s"
        # as_argument would hide both: a word that may name a file is completed by its type, None or
        # Path.
        kind = as_argument(read) if read not in (None, Path) else read
        self.add_argument(name, type=kind, default=default, help=help, **more)  # type: ignore[arg-type]

    def flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help)


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least this one, which is not below 0."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"must be a whole number, at least {least}, got {text!r}")
        return int(text)

    return read


from_zero, whole_number = at_least(0), at_least(1)


def number_in(interval: str) -> Callable[[str], float]:
    """Return a function that reads a finite number of an interval, as "(0, 1]" or "[0, inf)"."""
    least, most = map(float, interval[1:-1].split(","))
    holds_least, holds_most = interval[0] == "[", interval[-1] == "]"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        above = value > least or (holds_least and value == least)
        below = value < most or (holds_most and value == most)
        if not (above and below and math.isfinite(value)):
            raise ValueError(f"must lie in {interval}, got {text!r}")
        return value

    return read


share = number_in("(0, 1]")  # of entries, such as a density
above_zero = number_in("(0, inf)")


def output_file(text: str) -> Path:
    """Return the path of a file; check at once that rank 0 can write it, not after hours of work.

    Missing folders are made; the file's content stays.
    """
    path, job = Path(text), launched_by()
    if job is not None and job.rank > 0:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened to append: a file that is there keeps its content if the command fails later.
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{text} cannot be written: {error.strerror}") from None
    return path


STDOUT: Final = Path("-")  # in place of a file


def records_file(text: str) -> Path:
    """Return STDOUT of "-", or else the path of a file, as `output_file` does."""
    return STDOUT if text == "-" else output_file(text)


def for_people(records: Path | None) -> TextIO:
    """Return the stream for all but the records: stderr, where these take stdout."""
    return sys.stderr if records == STDOUT else sys.stdout


def write_records(content: object, file: Path | None) -> None:
    """Write records as JSON, if a file was asked for."""
    text = json.dumps(content, indent=1)
    if file == STDOUT:
        print(text)
    elif file is not None:
        file.write_text(f"{text}\n", encoding="utf-8")


PARAMETERS: Final = {
    "resnet20": 269_722,  # for CIFAR-10
    "mobilenet-v2": 3_504_872,
    "resnet18": 11_689_512,
    "vgg16-cifar": 14_728_266,
    "resnet50": 25_557_032,
    "lstm-an4": 27_569_568,  # five layers of 800 after two convolutions, Shi et al. 2019
    "resnet101": 44_549_160,
    "alexnet": 61_100_840,
    "lstm-ptb": 66_034_000,  # two layers of 1500, Zaremba et al. 2014
    "vit-b16": 86_567_656,
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
    "vgg16": 138_357_544,
    "bert-large": 335_141_888,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
}


# Commas and underscores between groups of three digits only: 1,5 is no 15.
_NUMBER: Final = r"(?P<number>(?:\d+|\d{1,3}(?:[_,]\d{3})+)(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)"
_BANDWIDTH: Final = re.compile(
    rf"{_NUMBER}\s*(?P<prefix>[kKmMgGtT]?)(?P<binary>i?)"
    r"(?P<unit>(?i:bits?|bytes?)|b|B)(?:/s|(?i:ps)|(?i:/sec))?"
)
_DURATION: Final = re.compile(rf"{_NUMBER}\s*(?P<unit>ns|us|µs|μs|ms|s)")
_COUNT: Final = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kKmMgGbB]?)")

# Beyond, sums and quotients of times leave the range of a float.
_BANDWIDTHS: Final = (1.0, 1e18)  # bits a second
_LONGEST: Final = 1e9  # seconds

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
    least, most = _BANDWIDTHS
    if not least <= rate <= most:
        raise ValueError(f"must be at least 1bit and at most {most / 1e9:g}gbit, got {text!r}")
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
    if not 1.0 <= _number(found["number"]) * times < math.inf:
        raise ValueError(f"must be at least 1, got {text!r}")
    exact = Decimal(_plain(found["number"])) * times
    if exact != exact.to_integral_value():
        raise ValueError(f"must be whole, got {text!r}")
    return int(exact)


def _number(text: str) -> float:
    return float(_plain(text))


def _plain(text: str) -> str:
    return text.replace("_", "").replace(",", "")
