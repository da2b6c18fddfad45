"""`gtopk bench wire` as people see it: options, a table for each list, and JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from ...arguments import as_argument, output_file, share
from ..selection.command import describe
from ..words import add_words
from .lists import Entries, from_file, trained, uniform
from .measure import Record, measure, table


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk bench wire",
        description="Encode and decode the same entries in every format: bytes and processor time "
        "per entry, and below which bandwidth a format pays for its work.",
        epilog="example:\n  gtopk bench wire --densities 0.001 0.01 --json wire.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("--entries", type=int, default=25_600, help="default: %(default)s")
    add_words(
        described,
        "--densities",
        share,
        [1e-4, 1e-3, 1e-2, 1e-1],
        metavar="D",
        help="default: 0.0001 0.001 0.01 0.1",
    )
    described.add_argument(
        "--elements",
        type=int,
        default=6_400_000,
        help="size of a network in training whose picks are encoded too; 0: none; "
        "default: %(default)s",
    )
    files = ".npz: indices, values, length"
    add_words(described, "--files", Path, [], metavar="FILE", help=files)
    described.add_argument(
        "--rounds", type=int, default=21, help="timed rounds; default: %(default)s"
    )
    described.add_argument(
        "--json", type=as_argument(output_file), help="file to write the records to"
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    if min(options.entries, options.rounds) < 1 or options.elements < 0:
        return _refuse("--entries and --rounds must be at least 1, --elements at least 0")
    try:
        given = [from_file(path) for path in options.files]
    except ValueError as error:
        return _refuse(str(error))
    machine = describe()
    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    print("nanoseconds of one thread per entry: median of rounds (lowest-highest)\n")
    records: list[Record] = []
    for entries in _lists(options, given):
        found = measure(entries, options.rounds)
        print(table(found), flush=True)
        records += found
    if options.json:
        written = {"machine": machine, "records": [_as_json(record) for record in records]}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
        print(f"written to {options.json}")
    return 0


def _lists(options: argparse.Namespace, given: list[Entries]) -> list[Entries]:
    drawn = [uniform(options.entries, density) for density in options.densities]
    picked = [trained(options.elements, d) for d in options.densities if options.elements]
    return drawn + picked + given


def _as_json(record: Record) -> dict[str, object]:
    """Return the fields; JSON knows no infinity, so a format that always pays has none there."""
    fields = record._asdict()
    if math.isinf(record.pays_below_gbit_per_second):
        fields["pays_below_gbit_per_second"] = None
    return fields


def _refuse(reason: str) -> int:
    print(f"gtopk bench wire: {reason}", file=sys.stderr)
    return 2
