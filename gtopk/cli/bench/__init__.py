"""`gtopk bench`: measurements of this machine and its network, one sub-command each."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
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


def _json_alone(words: list[str]) -> int:
    """Run a benchmark with its file of records as stdout, and what it prints on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "records.json")
        words[words.index("--json") + 1] = str(file)
        # What a benchmark prints for people must not get between the records.
        with contextlib.redirect_stdout(sys.stderr):
            code = _run(words)
        # Rank 0 alone writes it.
        if file.exists():
            print(file.read_text(encoding="utf-8"), end="")
    return code


def _run(words: list[str]) -> int:
    modules = {name: f".bench.{name}" for name in BENCHMARKS}
    return run_one_of(modules, words, usage(), "gtopk bench: no benchmark")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    words = list(sys.argv[2:] if arguments is None else arguments)
    if "--json" in words and words[words.index("--json") + 1 :][:1] == ["-"]:
        return _json_alone(words)
    return _run(words)
