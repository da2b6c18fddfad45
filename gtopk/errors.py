"""The exceptions that gtopk raises.

    RuntimeError
    |-- HorovodInternalError      an operation failed across ranks (Horovod's)
    |   `-- InvalidCallError      this rank cannot make this call; also a ValueError
    |-- HostsUpdatedInterrupt     the hosts of an elastic job have changed (Horovod's)
    |-- CheckpointError           a checkpoint cannot be written or found; raised on every rank
    |-- LaunchError               ranks cannot be started
    |   `-- LaunchTimeoutError    they ran longer than allowed
    `-- RankError                 a rank of gtopk.run failed
    ValueError
    |-- DamagedError              a checkpoint's file has changed since it was written
    `-- FormatError               a checkpoint's file has another version's format

`collectives.errors` has the exceptions of the layer below. Bad arguments raise ValueError or
TypeError, as elsewhere in Python: see `check_count` and the functions after it.
"""

from collections.abc import Iterable
from numbers import Real
from typing import Literal


def page(title: Literal["Tuning", "Clipping", "Checkpoints", "Several models, and GANs"]) -> str:
    """Return words that point to a page of the docs; an installed package has no docs files."""
    return f"'{title}' in gtopk's docs"


class HorovodInternalError(RuntimeError):
    """An operation failed across ranks: they disagreed, or one of them is gone.

    operation: the operation's name; "" if none had begun.
    """

    operation = ""


class InvalidCallError(HorovodInternalError, ValueError):
    """This rank cannot make this call, whatever the other ranks do; nothing was sent.

    Horovod raises HorovodInternalError in some functions and ValueError in others, so this class
    is both.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed: ranks were added, or will be removed.

    skip_sync: whether the remaining ranks still have equal state, so that none needs to be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync
        super().__init__("the hosts of the job have changed")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or found; every rank raises it, so that all can go on."""


class DamagedError(ValueError):
    """A file's contents differ from what was written; the message names the file and the reason."""


class FormatError(ValueError):
    """A file is intact, but this version cannot read its format."""


class LaunchError(RuntimeError):
    """Ranks cannot be started here."""


class LaunchTimeoutError(LaunchError):
    """The ranks ran longer than allowed and were terminated."""


class RankError(RuntimeError):
    """A rank failed.

    rank:      the rank that failed first.
    traceback: its traceback, as Python prints it; "" if the process ended without one.
    """

    def __init__(self, rank: int, text: str, traceback: str = "") -> None:
        super().__init__(f"{text}\n\n{traceback}".rstrip())
        self.rank = rank
        self.traceback = traceback


def check_count(name: str, value: object, least: Literal[0, 1] = 0) -> None:
    """Raise TypeError unless the value is an integer, ValueError if it is less than `least`."""
    # bool is an int in Python, and True would pass for a count of 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {'at least 1' if least else '0 or more'}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless the value is a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in (allowed := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
