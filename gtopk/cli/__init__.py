"""The command `gtopk`; each subcommand is a module or a package.

Only this package parses arguments, prints and draws. The rest of gtopk does not import it.

__init__.py    the table of subcommands, and exit codes
arguments.py   argument types: numbers with units, rates, files
completion.py  shell completion for bash, zsh and fish
charts/        charts and pages that several subcommands share
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from .. import __version__
from ..runtime.standard_streams import replace_unencodable_characters

# Each subcommand's module defines `main(arguments) -> exit code` and `parser()`. It is imported on
# demand, so that `gtopk doctor` works even if torch is broken.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "doctor": (".doctor", "check the installation, and say how to get what is missing"),
    "demo": (".demo", "train on local ranks with dense, top-k and gTop-k, and compare them"),
    "plan": (".plan", "estimate step time on a cluster, and whether compression pays"),
    "simulate": (".simulate", "compare adaptive batches on a modelled cluster"),
    "bench collectives": (
        ".bench.collectives",
        "time every reduction between these ranks, beside the model",
    ),
    "bench optimizer": (
        ".bench.optimizer",
        "time a distributed step, and how much of it overlap hides",
    ),
    "run": (".run", "start a script on several ranks, here or on other hosts"),
    "report": (".report", "draw a recorded run as one HTML page"),
    "top": (".top", "show what each rank of a run is doing"),
    "timeline": (".timeline", "merge the traces of all ranks"),
    "completion": (".completion", "shell completion for bash, zsh and fish"),
}
_INTERRUPTED: Final = 130
_UNREAD: Final = 141


def usage() -> str:
    """Return the help text."""
    listed = "\n".join(f"  {name:18} {what}" for name, (_, what) in COMMANDS.items())
    return (
        f"usage: gtopk COMMAND [ARGUMENTS]\n\n{listed}\n\n"
        "`gtopk COMMAND --help` has details and an example; `gtopk --version` prints the version.\n"
        "Exit codes: 0 success, 1 failure, 2 wrong usage."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns 130 after Ctrl-C and 141 if stdout's reader has exited (`gtopk plan ... | head -1`), as
    for programs killed by SIGINT or SIGPIPE, so that a shell with pipefail notices cut output.
    """
    # stdout is closed (>&-): writing must raise an OSError as on a full disk, not AttributeError.
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    # stderr is closed (2>&-): print() would write its lines to stdout, among the records.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    replace_unencodable_characters()
    try:
        try:
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
        # argparse exits after printing its help, which may still be buffered.
        except SystemExit:
            _flush()
            raise
        _flush()
        return code
    except KeyboardInterrupt:
        # Let the world's excepthook see the error, so that it ends the other ranks with the reason.
        if _is_one_of_several():
            raise
        return _INTERRUPTED
    except OSError as error:
        if _is_one_of_several() or not _lacks_stdout():
            raise
        if isinstance(error, BrokenPipeError):
            return _UNREAD
        print(f"gtopk: stdout cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _flush() -> None:
    """Flush stdout now, while write errors can still be handled."""
    print(end="", flush=True)


def _is_one_of_several() -> bool:
    """Tell whether there are other ranks, which the excepthook must inform of an error here."""
    world = sys.modules.get("gtopk.runtime.world.world")
    return world is not None and world.is_initialized() and world.current().size > 1


def _lacks_stdout() -> bool:
    """Tell whether it is stdout that fails; if so, redirect it to /dev/null."""
    try:
        print(flush=True)
    except OSError:
        # Python flushes stdout again at exit and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"gtopk {__version__}")
        return 0
    name_words = 2 if words[:1] == ["bench"] else 1  # words in the command's name
    name = " ".join(words[:name_words])
    if name in COMMANDS:
        command = importlib.import_module(COMMANDS[name][0], __package__)
        code: int = command.main(words[name_words:])
        return code
    if words[name_words - 1 : name_words] in (["-h"], ["--help"]):
        print(usage())
        return 0
    wrong = f"gtopk: unknown command {name!r}\n\n" if words else ""
    if followed_by := [each.split()[1] for each in COMMANDS if each.startswith(f"{name} ")]:
        wrong = f"gtopk: {name} must be followed by {' or '.join(followed_by)}\n\n"
    print(wrong + usage(), file=sys.stderr)
    return 2
