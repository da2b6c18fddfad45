"""The command `gtopk`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from . import __version__


def _bench(arguments: Sequence[str]) -> int:
    from .bench import main

    return main(arguments)


def _demo(arguments: Sequence[str]) -> int:
    from .demo.command import main

    return main(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from .doctor import main

    return main(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from .plan.command import main

    return main(arguments)


def _simulate(arguments: Sequence[str]) -> int:
    from .simulate.command import main

    return main(arguments)


# Each imports what it needs only when it is called: `gtopk doctor` works where torch is broken.
_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "bench": (_bench, "measure this machine and its network: selection, collectives"),
    "demo": (_demo, "train on local ranks with dense, top-k and gTop-k, and compare them"),
    "doctor": (_doctor, "what is installed and works here, with advice for what is missing"),
    "plan": (_plan, "what a step would take on a cluster, and whether compression would pay"),
    "simulate": (_simulate, "train on a modelled cluster of unlike ranks: which batches pay"),
}


def usage() -> str:
    """Return the help text."""
    listed = "\n".join(f"  {name:8} {what}" for name, (_, what) in _COMMANDS.items())
    return f"usage: gtopk COMMAND [ARGUMENTS]\n\n{listed}\n\n`gtopk COMMAND --help` tells more."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]][0](words[1:])
    if words and words[0] == "--version":
        print(f"gtopk {__version__}")
        return 0
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return 0
    wrong = f"gtopk: no command {words[0]!r}\n\n" if words else ""
    print(wrong + usage(), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
