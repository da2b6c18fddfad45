"""What can go wrong, as users catch it.

    RuntimeError
    |-- HorovodInternalError      an operation failed across ranks (Horovod's)
    |   `-- InvalidCallError      a call that cannot be made here; a ValueError, too
    |-- HostsUpdatedInterrupt     the hosts of an elastic job have changed (Horovod's)
    |-- CheckpointError           a checkpoint cannot be written or found; the same on every rank
    |-- LaunchError               ranks cannot be started
    |   `-- LaunchTimeoutError    they ran longer than allowed
    `-- RankError                 a rank of gtopk.run failed
    ValueError
    |-- DamagedError              a checkpoint's file does not hold what was written to it
    `-- FormatError               a checkpoint's file is of another version

`collectives.errors` has what goes wrong below, between arrays. Bad arguments are ValueError or
TypeError, as everywhere in Python: `check_count` and the like raise them.
"""

from collections.abc import Iterable
from numbers import Real
from typing import Literal


def page(title: Literal["Tuning", "Clipping", "Checkpoints", "Several models, and GANs"]) -> str:
    """Return where a page of the docs is, or a part of one: an installed package has no files."""
    return f"'{title}' in gtopk's docs"


class HorovodInternalError(RuntimeError):
    """An operation failed across ranks: they disagreed, or one of them is gone.

    operation: its name; "" where none had begun.
    """

    operation = ""


class InvalidCallError(HorovodInternalError, ValueError):
    """A call that cannot be made here, whatever the other ranks do; nothing was sent.

    Horovod raises the one or the other, by the function: who catches either catches this.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed: ranks were added, or are to be removed.

    skip_sync: whether the ranks that stay are still in step, so that nothing needs to be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync
        super().__init__("the hosts of the job have changed")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or found; the same on every rank, so that all may go on."""


class DamagedError(ValueError):
    """A file does not hold what was written to it; the text names it and says why."""


class FormatError(ValueError):
    """A file is whole, and of a format that this version does not read."""


class LaunchError(RuntimeError):
    """Ranks cannot be started here."""


class LaunchTimeoutError(LaunchError):
    """The ranks ran longer than allowed, and have been ended."""


class RankError(RuntimeError):
    """A rank failed: which, with what, and the traceback it had there.

    rank:      the rank that failed first.
    traceback: its traceback, as Python prints it; "" where the process ended without one.
    """

    def __init__(self, rank: int, text: str, traceback: str = "") -> None:
        super().__init__(f"{text}\n\n{traceback}".rstrip())
        self.rank = rank
        self.traceback = traceback


def check_count(name: str, value: object, least: Literal[0, 1] = 0) -> None:
    """Raise TypeError or ValueError for what is no number of things from `least` on."""
    # bool is an int in Python, and True would pass for a count of 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {'at least 1' if least else '0 or more'}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError for what is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError for what is none of the choices."""
    if value not in (known := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
