"""Watchdog: ends a process whose start takes too long, or can come to nothing any more.

A program of its own, and of the standard library alone: what it watches may hold Python's lock all
the while. `world.joining` starts it; it ends when its stdin does.

Argument: a `Lookout` as a list in JSON.
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
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_LOOK_SECONDS: Final = 0.3
_STARTED: Final = 19  # in /proc/PID/stat, behind the name: when, in ticks since the machine's start
# Launchers start their ranks one after the other, and end them all where one of them fails.
_COMES_SECONDS: Final = 3.0  # from when the last rank was started, for another one to be
_ENDS_SECONDS: Final = 1.0  # from when a rank is missed, for its launcher to speak and end the job


class Roll(NamedTuple):
    """The ranks that the watched process's parent has started, itself among them.

    missed:   what to say when one of them has ended, which {} tells in words.
    variable: that has a rank's number in its environment; `rank` is the watched process's.
    ranks:    how many there are. is_all: they are the whole job.
    """

    missed: str
    variable: str
    rank: int
    ranks: int
    is_all: bool


class Lookout(NamedTuple):
    """The watchdog's order: the conditions to look for, and the message before it ends the process.

    late:     when `seconds` are over.
    orphaned: when the process `launcher` is its parent no more; 0: none is looked for.
    roll:     is called where there is one.
    file:     where to write what is said, too, and what else is to be in there; "": nowhere. Who
              reads a rank's stderr may be its launcher, and gone.
    """

    seconds: float
    late: str
    launcher: int = 0
    orphaned: str = ""
    roll: Roll | None = None
    file: str = ""
    record: Mapping[str, Any] = {}


class Caller:
    """Calls a roll, again and again."""

    def __init__(self, roll: Roll, own: int) -> None:
        self.roll = roll
        self._own, self._parent = own, parent_of(own)
        self._numbers: dict[int, int] = {}  # of every process that told one
        self._since = 0.0
        self._absent: list[int] | None = None  # known since then; None: nobody is

    def missing(self) -> str:
        """Return which rank has ended, in words; "": none, or nobody can tell."""
        here = _children(self._parent)
        silent = 0  # that do not tell which rank they are
        for pid in here - self._numbers.keys():
            number = variable_of(pid, self.roll.variable)
            if number is None:
                silent += 1
            elif number.isdecimal():
                self._numbers[pid] = int(number)
                self._absent = None
        present = {number for pid, number in self._numbers.items() if pid in here}
        ranks = here & self._numbers.keys()
        if len(present) < len(ranks) or self._numbers.get(self._own) != self.roll.rank:
            self._numbers.clear()  # the variable is not the launcher's, or not yet
            self._absent = None
            return ""
        if self._own not in here or len(present) + silent >= self.roll.ranks:
            self._absent = None
            return ""
        if self._absent is None:
            known = range(self.roll.ranks) if self.roll.is_all else self._numbers.values()
            self._since, self._absent = time.monotonic(), sorted(set(known) - present)
        # Who began to look late, after a long import, need not wait for those that were to come.
        still_come = min(map(age_seconds, ranks)) < _COMES_SECONDS
        if still_come or time.monotonic() - self._since < _ENDS_SECONDS:
            return ""
        numbers = " and ".join(map(str, self._absent))
        if silent or not numbers:
            return "a rank has ended"
        return f"ranks {numbers} have ended" if self._absent[1:] else f"rank {numbers} has ended"


def _children(pid: int) -> set[int]:
    """Return the living processes that another one has started."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                found.update(map(int, children.read().split()))
    return {child for child in found if _stat(child)[:1] not in ([], [b"Z"])}


def _stat(pid: int) -> list[bytes]:
    """Return what Linux tells of a process, behind its name; nothing where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable's value where a process began; "": not set, None: nobody may know.

    A process may have written something else in its place (setproctitle).
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
    """Return the process that started another one, or has adopted it; 0 where that has ended."""
    return int((_stat(pid) or [b"", b"0"])[1])


def age_seconds(pid: int) -> float:
    """Return how long ago a process was started; 0 where that is not known."""
    words = _stat(pid)
    if len(words) <= _STARTED:
        return 0.0
    since_boot = int(words[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, beside, and rename it; where that cannot be, nothing is there."""
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


def watch(lookout: Lookout) -> None:
    """Return when stdin is closed; before, should it come to that, end this process's parent."""
    watched, begun = os.getppid(), time.monotonic()
    caller = Caller(lookout.roll, watched) if lookout.roll is not None else None
    while True:
        left = max(0.0, begun + lookout.seconds - time.monotonic())
        if select.select([0], [], [], min(left, _LOOK_SECONDS))[0]:
            return
        why = lookout.late if time.monotonic() - begun >= lookout.seconds else ""
        if caller is not None and (ended := caller.missing()):
            why = caller.roll.missed.format(ended)
        if lookout.launcher and parent_of(watched) not in (0, lookout.launcher):
            why = lookout.orphaned
        if why:
            with contextlib.suppress(OSError):  # whoever has read it may be gone, too
                os.write(2, f"{why}\n".encode(errors="replace"))
            if lookout.file:
                text = why.removeprefix("gtopk: ")
                write_record(lookout.file, {**lookout.record, "time": now(), "text": text})
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched, signal.SIGKILL)
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's is the watched process's to answer
    lookout = Lookout(*json.loads(sys.argv[1]))
    watch(lookout._replace(roll=Roll(*lookout.roll) if lookout.roll else None))
