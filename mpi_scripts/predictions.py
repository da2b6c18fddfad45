"""Hold what was foretold of reductions against the clock: a table of the errors.

python mpi_scripts/predictions.py FOLDER/*.json     files of `gtopk bench collectives --json`
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

# By path, Python would find no gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtopk.bench.collectives.command import read
from gtopk.bench.collectives.record import Results


class Forecast(NamedTuple):
    """One way to reduce, on one network; error: (foretold - measured) / measured."""

    file: str
    ranks: int
    way: str
    foretold_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """Return how far off it was, of what was measured."""
        return self.foretold_seconds / self.measured_seconds - 1


def forecasts(name: str, results: Results) -> Iterable[Forecast]:
    """Yield every record that has a model."""
    for record in results["records"]:
        wire, code = record["modelled_wire_seconds"], record["modelled_code_seconds"]
        if record["ours"] and wire is not None:
            foretold = wire + (code or 0.0)
            measured = record["seconds"]["median"]
            yield Forecast(name, record["ranks"], record["label"], foretold, measured)


def row(way: str, found: Sequence[Forecast]) -> str:
    """Return a row of the table: how many, the errors, and the worst."""
    sizes = sorted(abs(each.error) for each in found)
    within = sum(size <= 0.2 for size in sizes)
    worst = max(found, key=lambda each: abs(each.error))
    return (
        f"| {way} | {len(found)} | {100 * statistics.median(sizes):.0f} % | {within} "
        f"| {100 * worst.error:+.0f} % ({worst.file}, {worst.ranks} ranks) |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    found = [each for path in options.files for each in forecasts(path.stem, read(path))]
    print("| | networks | median error | within 20 % | worst |")
    print("|---|---|---|---|---|")
    for way in dict.fromkeys(each.way for each in found):
        print(row(way, [each for each in found if each.way == way]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
