"""Harness of all benchmarks: their parser and JSON, their ranks, progress, and spreads over rounds.

Words of an option have spaces between them, not commas, as a word may hold some itself:
gtopk:growth=2.0,put_back=spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, TypedDict, TypeVar

from collectives.errors import PeerError
from collectives.transports import Transport

from ...runtime.world.joining import join
from ...runtime.world.state import emulate_on
from ..arguments import as_argument, output_file

TIMEOUT_SECONDS: Final = 3600.0  # ranks that are not measured wait for those that are
T = TypeVar("T")


def add_words(
    described: argparse.ArgumentParser,
    option: str,
    read: Callable[[str], T],
    default: Sequence[T] | None = None,
    *,
    may_be_none: bool = False,
    metavar: str = "NAME",
    help: str | None = None,
) -> None:
    """Let a grammar have an option of one word or more, each as `read` returns it.

    read:        raises ValueError for a word that it does not know.
    may_be_none: the option may stand without a word, for none at all.
    """

    def word(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            apart = f"; give several with spaces: {text.replace(',', ' ')}" if "," in text else ""
            raise argparse.ArgumentTypeError(f"{error}{apart}") from None

    many = "*" if may_be_none else "+"
    described.add_argument(
        option, type=word, nargs=many, default=default, metavar=metavar, help=help
    )


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return what reads one of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be one of {', '.join(known)}; got {text!r}")
        return text

    return read


def tell(text: str = "") -> None:
    """Show a text in place of the last one; none clears the line, for what is printed next."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def silent(text: str = "") -> None:
    """Tell nothing: another rank does."""


class Spread(TypedDict):
    """Of one number over the rounds."""

    min: float
    lower_quartile: float
    median: float
    upper_quartile: float
    max: float


class PerRank(TypedDict):
    """Of one number over the ranks, per round."""

    mean: float
    max: float


def spread(seconds: Sequence[float]) -> Spread:
    """Return the spread of a contender's rounds."""
    if len(seconds) == 1:
        quartiles = [seconds[0]] * 3
    else:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(
        min=min(seconds),
        lower_quartile=quartiles[0],
        median=quartiles[1],
        upper_quartile=quartiles[2],
        max=max(seconds),
    )


def per_rank(numbers: Sequence[float]) -> PerRank:
    """Return the spread over the ranks."""
    return PerRank(mean=statistics.fmean(numbers), max=max(numbers))


def bench_parser(
    benchmark: str, description: str, launched: bool = False
) -> argparse.ArgumentParser:
    """Return a parser for a benchmark that can write its records as JSON.

    launched: its example is a call under mpirun.
    """
    call = f"gtopk bench {benchmark} --json {benchmark}.json"
    described = argparse.ArgumentParser(
        prog=f"gtopk bench {benchmark}",
        description=description,
        epilog=f"example:\n  {'mpirun -n 4 ' * launched}{call}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument(
        "--json", type=as_argument(output_file), help="file to write the records to"
    )
    return described


def write_json(content: object, path: Path | None) -> None:
    """Write what a benchmark has found, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")


def refuse(benchmark: str, reason: object) -> int:
    """Print why nothing can be measured, and return the exit code of wrong usage."""
    print(f"gtopk bench {benchmark}: {reason}", file=sys.stderr)
    return 2


def on_launched_rank(work: Callable[[Transport], object], over: str | None = None) -> int:
    """Do a benchmark's work as one rank of a launcher's; a failure here ends the job.

    over: the transport; None: the one that training would use.
    """
    transport = join(over=over, timeout_seconds=TIMEOUT_SECONDS)
    try:
        emulate_on(transport)
        work(transport)
    except BaseException as error:
        if not isinstance(error, PeerError) or transport.rank == 0:
            traceback.print_exc()
        sys.stderr.flush()
        transport.abort(1)
        raise
    return 0
