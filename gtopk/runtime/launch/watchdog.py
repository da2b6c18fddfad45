"""Watchdog: ends a process whose start takes too long, or cannot succeed any more.

`world.joining` starts it: as a thread, or, where the start holds Python's lock throughout, as a
separate program, which uses the standard library alone and ends when its stdin does.

The program's argument: a `WatchdogSettings` as a list in JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

_LOOK_SECONDS: Final = 0.3
_PRINT_SECONDS: Final = 1.0  # for the reader of stderr to take the message
_STARTED: Final = 19  # field of /proc/PID/stat behind the name: start, in ticks since the boot
# Launchers start their ranks one after the other, and end them all where one of them fails.
_COMES_SECONDS: Final = 3.0  # after one rank's start, for the launcher to start the next
_ENDS_SECONDS: Final = 1.0  # after a rank's end, for its launcher to report it and end the job


class Siblings(NamedTuple):
    """The ranks that the watched process's parent has started, itself among them.

    missed:   the message when some of them have ended; {} stands for which.
    variable: the environment variable of a rank's number; `rank` is the watched process's number.
    ranks:    how many there are. is_all: whether they are the whole job.
    """

    missed: str
    variable: str
    rank: int
    ranks: int
    is_all: bool


class WatchdogSettings(NamedTuple):
    """The watchdog's argument: the conditions to look for, and the message for each.

    late:     the message when `seconds` are over.
    orphaned: the message when the process `launcher` is no longer its parent; launcher 0: that is
              not checked.
    siblings: the ranks to look for; None: none.
    file:     the failure file that gets the message, too, added to `record`; "": none. The launcher
              that reads a rank's stderr may be gone.
    """

    seconds: float
    late: str
    launcher: int = 0
    orphaned: str = ""
    siblings: Siblings | None = None
    file: str = ""
    record: Mapping[str, Any] = {}


class SiblingWatch:
    """Checks repeatedly whether all siblings are alive."""

    def __init__(self, siblings: Siblings, own: int) -> None:
        self.siblings = siblings
        self._own, self._parent = own, parent_of(own)
        self._numbers: dict[int, int] = {}  # by pid, of processes whose environment has one
        self._since = 0.0
        self._absent: list[int] | None = None  # ranks missing since `_since`; None: none are

    def missing(self) -> str:
        """Return a text that names the ranks that have ended; "": none, or that is unknown."""
        here = _children(self._parent)
        silent = 0  # processes that do not show which rank they are
        for pid in here - self._numbers.keys():
            number = variable_of(pid, self.siblings.variable)
            if number is None:
                silent += 1
            elif number.isdecimal():
                self._numbers[pid] = int(number)
                self._absent = None
        present = {number for pid, number in self._numbers.items() if pid in here}
        ranks = here & self._numbers.keys()
        if len(present) < len(ranks) or self._numbers.get(self._own) != self.siblings.rank:
            self._numbers.clear()  # the variable is not the launcher's, or not yet
            self._absent = None
            return ""
        if self._own not in here or len(present) + silent >= self.siblings.ranks:
            self._absent = None
            return ""
        if self._absent is None:
            known = range(self.siblings.ranks) if self.siblings.is_all else self._numbers.values()
            self._since, self._absent = time.monotonic(), sorted(set(known) - present)
        # A watchdog that began late, after a long import, need not wait for further starts.
        still_come = min(map(age_seconds, ranks)) < _COMES_SECONDS
        if still_come or time.monotonic() - self._since < _ENDS_SECONDS:
            return ""
        numbers = " and ".join(map(str, self._absent))
        if silent or not numbers:
            return "a rank has ended"
        return f"ranks {numbers} have ended" if self._absent[1:] else f"rank {numbers} has ended"


def _children(pid: int) -> set[int]:
    """Return the pids of a process's living children."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        # A launcher with threads: each thread has the children that it has started.
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                found.update(map(int, children.read().split()))
    return {child for child in found if _stat(child)[:1] not in ([], [b"Z"])}


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat behind the name; [] where the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # Behind the last parenthesis, as the name may hold any character.
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable's value at a process's start; "": not set, None: it cannot be read.

    A process may have overwritten it with other text (setproctitle).
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            variables = environ.read().split(b"\0")
    except OSError:
        return None
    if not any(b"=" in each for each in variables):
        return None
    start = f"{name}=".encode()
    found = (each for each in variables if each.startswith(start))
    return next(found, b"").removeprefix(start).decode(errors="replace")


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 where the process has ended."""
    return int((_stat(pid) or [b"", b"0"])[1])


def age_seconds(pid: int) -> float:
    """Return how many seconds ago a process was started; 0 where that is not known."""
    words = _stat(pid)
    if len(words) <= _STARTED:
        return 0.0
    since_boot = int(words[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a record as JSON by renaming a temporary file; where that fails, no file is left."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(beside, "w") as file:
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def now() -> str:
    """Return the time of a record: UTC, to the millisecond."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def watch(settings: WatchdogSettings, watched: int, is_over: Callable[[float], bool]) -> None:
    """Watch a process until its start is over; end it when one of its conditions comes true.

    is_over: waits for so many seconds at most; tells whether the start is over.
    """
    begun = time.monotonic()
    siblings = SiblingWatch(settings.siblings, watched) if settings.siblings is not None else None
    while True:
        left = max(0.0, begun + settings.seconds - time.monotonic())
        if is_over(min(left, _LOOK_SECONDS)):
            return
        why = settings.late if time.monotonic() - begun >= settings.seconds else ""
        if siblings is not None and (ended := siblings.missing()):
            why = siblings.siblings.missed.format(ended)
        if settings.launcher and parent_of(watched) not in (0, settings.launcher):
            why = settings.orphaned
        if why and not is_over(0.0):  # to look may have taken long
            # The reader may be gone, too, or read no more: the process is ended all the same.
            if select.select([], [2], [], _PRINT_SECONDS)[1]:
                with contextlib.suppress(OSError):
                    os.write(2, f"{why}\n".encode(errors="replace"))
            if settings.file:
                text = why.removeprefix("gtopk: ")
                write_record(settings.file, {**settings.record, "time": now(), "text": text})
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched, signal.SIGKILL)
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the watched process to handle
    own_settings = WatchdogSettings(*json.loads(sys.argv[1]))
    siblings = Siblings(*own_settings.siblings) if own_settings.siblings else None
    watch(
        own_settings._replace(siblings=siblings),
        os.getppid(),
        lambda seconds: bool(select.select([0], [], [], seconds)[0]),
    )
