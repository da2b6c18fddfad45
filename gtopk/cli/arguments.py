"""The argument parser of the `gtopk` subcommands, and the types of their arguments.

PARAMETERS holds the sizes of well-known models of torchvision and Hugging Face, heads included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

from ..runtime.launch import launched_by

T = TypeVar("T")


def fail(command: str, reason: object, code: int = 1) -> int:
    """Print on stderr why a command fails, and return its exit code."""
    print(f"gtopk {command}: {reason}", file=sys.stderr)
    return code


def as_argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `read` so that its ValueError becomes argparse's ArgumentTypeError."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks the options' help at spaces only, so that a name such as adaptive-sgd stays whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Command(argparse.ArgumentParser):
    """The parser of a subcommand; its help ends with an example of a call."""

    def __init__(self, call: str, description: str, example: str, **more: Any) -> None:
        """call: the full command, such as "gtopk plan"."""
        super().__init__(
            prog=call,
            # The raw formatter wraps only the options' help, so wrap the description here.
            description=textwrap.fill(description, 80, break_on_hyphens=False),
            epilog=f"example:\n  {example}",
            formatter_class=_Formatter,
            **more,
        )

    def option(
        self, name: str, read: Callable[[str], Any] | None, default: Any, help: str, **more: Any
    ) -> None:
        """Add an option; its help shows the default, unless that is None.

        read: converts the text and raises ValueError for a bad one; None keeps the text.
        """
        if default is not None and "default" not in help:
            help += "; default: %(default)s"
        # Keep None and Path unwrapped: shell completion offers files for options of these types.
        kind = as_argument(read) if read not in (None, Path) else read
        self.add_argument(name, type=kind, default=default, help=help, **more)  # type: ignore[arg-type]

    def flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help)


_MOST_DIGITS: Final = 15


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads an integer >= least; least >= 0."""

    def read(text: str) -> int:
        # Python refuses to convert thousands of digits.
        if text.isdecimal() and len(text) > _MOST_DIGITS:
            raise ValueError(f"must have at most {_MOST_DIGITS} digits, got {text!r}")
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"must be a whole number, at least {least}, got {text!r}")
        return int(text)

    return read


from_zero, whole_number = at_least(0), at_least(1)


def number_in(interval: str) -> Callable[[str], float]:
    """Return a function that reads a finite number in an interval: "(0, 1]" or "[0, inf)"."""
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


share = number_in("(0, 1]")  # a fraction of the entries, such as a density
above_zero = number_in("(0, inf)")


def output_file(text: str) -> Path:
    """Return a path; check now, not after hours of work, that rank 0 can write the file.

    Creates missing folders; keeps the content of an existing file.
    """
    path, job = Path(text), launched_by()
    if job is not None and job.rank > 0:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open for appending: an existing file keeps its content if the command fails later.
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    return path


STDOUT: Final = Path("-")  # in place of a file


def records_file(text: str) -> Path:
    """Return STDOUT for "-", otherwise the path that `output_file` returns."""
    return STDOUT if text == "-" else output_file(text)


def text_stream(records: Path | None) -> TextIO:
    """Return the stream for human-readable output: stderr if the records go to stdout."""
    return sys.stderr if records == STDOUT else sys.stdout


def json_value(value: Any) -> Any:
    """Convert a value to JSON types: records to objects, NaN and infinity to null."""
    if dataclasses.is_dataclass(value):
        return {
            each.name: json_value(getattr(value, each.name)) for each in dataclasses.fields(value)
        }
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_records(content: object, file: Path | None = STDOUT) -> None:
    """Write records as JSON (see `json_value`) if a file was requested.

    Raises SystemExit, with a message, if the file cannot be written.
    """
    text = json.dumps(json_value(content), indent=1)
    if file == STDOUT:
        print(text)
    elif file is not None:
        try:
            file.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:  # the disk is full
            sys.exit(f"gtopk: {file} cannot be written: {error.strerror}")


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
