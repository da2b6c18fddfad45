"""`gtopk top` as people call it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..arguments import above_zero, as_argument
from ..recording.reading import Run, read_run
from .show import as_lines, as_table
from .status import Status, status_of

_TAIL_BYTES: Final = 1 << 17  # of each file: some hundred steps


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk top",
        description="Show what each rank of a run does now, from the record that it writes; on a "
        "terminal again and again, until Ctrl-C or the run's end.",
        epilog="example:\n  gtopk top runs/first\n  gtopk top runs/first --once --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("run", type=Path, metavar="RUN", help="the folder of its record")
    described.add_argument("--once", action="store_true", help="show it once")
    described.add_argument(
        "--every",
        type=as_argument(above_zero),
        default=1.0,
        metavar="SECONDS",
        help="default: %(default)s",
    )
    described.add_argument("--json", action="store_true", help="a JSON object for each look")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the run and return the exit code: 1 where there is none."""
    options = parser().parse_args(arguments)
    live = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    try:
        if options.json or options.once or not live:
            return _print(options.run, options.once or not options.json, options)
        return _refresh(options.run, options.every)
    except ValueError as error:
        print(f"gtopk top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _look(folder: Path) -> tuple[Run, list[Status]]:
    """Return the run as it is now; raise ValueError where it cannot be read."""
    try:
        run = read_run(folder, _TAIL_BYTES)
        return run, status_of(run, folder)
    except OSError as error:
        raise ValueError(str(error)) from error


def _print(folder: Path, once: bool, options: argparse.Namespace) -> int:
    while True:
        run, statuses = _look(folder)
        if options.json:
            looked = [dataclasses.asdict(status) for status in statuses]
            print(json.dumps({"unix_seconds": time.time(), "ranks": looked}), flush=True)
        else:
            print("\n".join(as_lines(statuses)))
        if once or _is_over(run):
            return 0
        time.sleep(options.every)


def _is_over(run: Run) -> bool:
    return all(rank.end is not None for rank in run.ranks)


def _refresh(folder: Path, every: float) -> int:
    from rich.console import Console
    from rich.live import Live

    # rich itself looks at NO_COLOR; TERM=dumb has no way to draw over a line.
    console = Console(force_terminal=os.environ.get("TERM") != "dumb", highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run, statuses = _look(folder)
            live.update(as_table(statuses, f"{folder}", console.width), refresh=True)
            if _is_over(run):
                return 0
            time.sleep(every)
