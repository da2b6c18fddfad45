"""`gtopk bench`: measurements of this machine and its network, one sub-command each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from .. import run_one_of

# Each is a module here, with its `parser` and `main`, that is imported when it is called.
BENCHMARKS: Final[dict[str, str]] = {
    "collectives": "every reduction, compared with baselines and the model",
    "optimizer": "the cost of a distributed step, and how much overlap hides",
}


def usage() -> str:
    """Return the help text."""
    listed = "\n".join(f"  {name:12} {what}" for name, what in BENCHMARKS.items())
    return (
        f"usage: gtopk bench WHAT [ARGUMENTS]\n\n{listed}\n\n"
        "example:\n  mpirun -n 4 gtopk bench collectives --json collectives.json\n\n"
        "`gtopk bench WHAT --help` has details. `--json -` prints only the records, all else on "
        "stderr."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    words = list(sys.argv[2:] if arguments is None else arguments)
    modules = {name: f".bench.{name}" for name in BENCHMARKS}
    return run_one_of(modules, words, usage(), "gtopk bench: no benchmark")
