"""`gtopk top` as people call it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...telemetry.reading import NoRunError, Reader
from ...telemetry.soundness import shown
from ..arguments import as_argument, number_in
from .show import as_lines, as_table
from .status import RECENT, Status, status_of


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk top",
        description="Show what each rank of a run is doing, from the record that it writes. On a "
        "terminal it waits for a run to begin, and refreshes until Ctrl-C or the end of the run.",
        epilog="example:\n  gtopk top runs/first\n  gtopk top runs/first --once --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("run", type=Path, metavar="RUN", help="folder with the record")
    described.add_argument("--once", action="store_true", help="show once and exit")
    described.add_argument(
        "--every",
        type=as_argument(number_in("(0, 86400]")),
        default=1.0,
        metavar="SECONDS",
        help="seconds between refreshes; default: %(default)s",
    )
    described.add_argument("--json", action="store_true", help="print one JSON object per refresh")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the run and return the exit code: 1 where there is none."""
    options = parser().parse_args(arguments)
    live = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    try:
        looks: Iterator[list[Status]] = _looks(options.run, options.every)
        if options.once or not (options.json or live):
            looks = itertools.islice(looks, 1)
        else:
            _await_run(options.run, options.every)
        if options.json or options.once or not live:
            _print(looks, options.json)
        else:
            _refresh(looks, options.run)
        return 0
    except ValueError as error:
        print(f"gtopk top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gtopk top: ended by Ctrl-C; the run itself goes on", file=sys.stderr)
        return 0


def _await_run(folder: Path, every: float) -> None:
    """Return when a run has begun to write its record there."""
    said = False
    while True:
        try:
            Reader(folder, RECENT).read()
            return
        except OSError as error:
            raise ValueError(str(error)) from error
        except NoRunError:
            if not said:
                print(f"gtopk top: waiting for a run to begin in '{folder}'", file=sys.stderr)
            said = True
        time.sleep(every)


def _looks(folder: Path, every: float) -> Iterator[list[Status]]:
    """Yield what the ranks do now, again and again until the run is over.

    Says on stderr whose record is missing, whenever that changes; raises ValueError where there is
    no run to be read.
    """
    lacked: list[tuple[str, str]] = []
    reader = Reader(folder, RECENT)
    while True:
        try:
            run = reader.read()
            statuses = status_of(run, folder)
        except OSError as error:
            raise ValueError(str(error)) from error
        lacks = [each for each in (run.lacks(), run.unread()) if each is not None]
        for each in lacks:
            if each not in lacked:
                print(f"gtopk top: {': '.join(each)}", file=sys.stderr)
        lacked = lacks
        yield statuses
        if all(rank.end is not None for rank in run.ranks):
            return
        time.sleep(every)


def _print(looks: Iterable[list[Status]], as_json: bool) -> None:
    for statuses in looks:
        if as_json:
            looked = [dataclasses.asdict(status) for status in statuses]
            print(json.dumps({"unix_seconds": time.time(), "ranks": looked}), flush=True)
        else:
            print("\n".join(as_lines(statuses)))


def _refresh(looks: Iterable[list[Status]], folder: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    # rich itself looks at NO_COLOR; TERM=dumb has no way to draw over a line.
    console = Console(force_terminal=os.environ.get("TERM") != "dumb", highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        for statuses in looks:
            live.update(as_table(statuses, shown(f"{folder}"), console.width), refresh=True)
