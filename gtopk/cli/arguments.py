"""The grammar of the subcommands of `gtopk`, and the types of their arguments.

Models by their well-known names are torchvision's and Hugging Face's, heads included.
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


def in_json(value: Any) -> Any:
    """Return a value in the types of JSON: records as objects, and null for NaN and infinity."""
    if dataclasses.is_dataclass(value):
        return {each.name: in_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: in_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_records(content: object, file: Path | None = STDOUT) -> None:
    """Write records as JSON, see `in_json`, if a file was asked for."""
    text = json.dumps(in_json(content), indent=1)
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
