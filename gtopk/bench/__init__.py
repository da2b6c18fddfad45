"""`gtopk bench`: measurements of this machine and its network, one sub-command each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def _collectives(arguments: Sequence[str]) -> int:
    from .collectives.command import main

    return main(arguments)


def _engine(arguments: Sequence[str]) -> int:
    from .engine.command import main

    return main(arguments)


def _optimizer(arguments: Sequence[str]) -> int:
    from .optimizer.command import main

    return main(arguments)


def _scaling(arguments: Sequence[str]) -> int:
    from .scaling.command import main

    return main(arguments)


def _selection(arguments: Sequence[str]) -> int:
    from .selection.command import main

    return main(arguments)


def _wire(arguments: Sequence[str]) -> int:
    from .wire.command import main

    return main(arguments)


# Each imports what it needs only when it is called.
_BENCHMARKS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "collectives": (_collectives, "every reduction beside the baselines and the model"),
    "engine": (_engine, "matching operations by name, and fusion, beside a bare allreduce"),
    "optimizer": (_optimizer, "what a distributed step costs, and what of it overlap hides"),
    "scaling": (_scaling, "training steps beside S-SGD, DDP with its hooks, the published table"),
    "selection": (_selection, "accumulate and select beside other selectors, on this machine"),
    "wire": (_wire, "bytes and time per entry of each format, and where it pays"),
}


def usage() -> str:
    """Return the help text."""
    listed = "\n".join(f"  {name:12} {what}" for name, (_, what) in _BENCHMARKS.items())
    return (
        f"usage: gtopk bench WHAT [ARGUMENTS]\n\n{listed}\n\n`gtopk bench WHAT --help` tells more."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    words = list(sys.argv[2:] if arguments is None else arguments)
    if words and words[0] in _BENCHMARKS:
        return _BENCHMARKS[words[0]][0](words[1:])
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return 0
    wrong = f"gtopk bench: no benchmark {words[0]!r}\n\n" if words else ""
    print(wrong + usage(), file=sys.stderr)
    return 2
