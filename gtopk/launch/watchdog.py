"""Watchdog: ends a process whose start takes too long, or can come to nothing any more.

A program of its own, and of the standard library alone (deadline.py starts it): what it watches may
hold Python's lock all the while. It ends when its stdin does.

Argument: a `Watch` as a list in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Final, NamedTuple

_LOOK_SECONDS: Final = 0.3
_ABSENT_SECONDS: Final = 3.0  # until a rank is missed: launchers start one after the other


class Watch(NamedTuple):
    """What to look for, and what to say, before the watched process is ended.

    late:     when `seconds` are over.
    orphaned: when the process `launcher` is its parent no more; 0: none is looked for.
    missed:   when of the `ranks` that the same process started as the watched one, one has ended,
              which {} tells in words; 0: nobody looks. `variable` has a rank's number in the
              environment. `is_all`: they are the whole job.
    """

    seconds: float
    late: str
    launcher: int = 0
    orphaned: str = ""
    ranks: int = 0
    missed: str = ""
    variable: str = ""
    is_all: bool = False


class _Roll:
    """Who is there of the ranks that one launcher started on this host."""

    def __init__(self, watch: Watch, own: int) -> None:
        self._watch = watch
        self._own, self._launcher = own, parent_of(own)
        self._numbers: dict[int, int] = {}  # of every process seen
        self._since = 0.0
        self._absent: list[int] | None = None  # since then; None: all are there

    def missing(self) -> str:
        """Return which rank has ended, in words; "": none, or nobody can tell."""
        here = _children(self._launcher)
        for pid in here - self._numbers.keys():
            number = variable_of(pid, self._watch.variable)
            if number is not None and number.isdecimal():
                self._numbers[pid] = int(number)
        present = {number for pid, number in self._numbers.items() if pid in here}
        if self._own not in self._numbers or len(present) >= self._watch.ranks:
            self._absent = None
            return ""
        if self._absent is None:
            known = range(self._watch.ranks) if self._watch.is_all else self._numbers.values()
            self._since, self._absent = time.monotonic(), sorted(set(known) - present)
        if time.monotonic() - self._since < _ABSENT_SECONDS:
            return ""
        numbers = " and ".join(map(str, self._absent))
        if len(self._absent) > 1:
            return f"ranks {numbers} have ended"
        return f"rank {numbers} has ended" if numbers else "a rank has ended"


def _children(pid: int) -> set[int]:
    """Return the processes that another one started and has not buried."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                found.update(map(int, children.read().split()))
    return found


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable's value where a process began; "": not set, None: nobody may know."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            variables = environ.read().split(b"\0")
    except OSError:
        return None
    start = f"{name}=".encode()
    found = (each for each in variables if each.startswith(start))
    return next(found, b"").removeprefix(start).decode(errors="replace")


def parent_of(pid: int) -> int:
    """Return the process that started another one, or has adopted it; 0 where that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def watch(for_what: Watch) -> None:
    """Return when stdin is closed; before, should it come to that, end this process's parent."""
    watched, begun = os.getppid(), time.monotonic()
    roll = _Roll(for_what, watched) if for_what.ranks else None
    while True:
        left = max(0.0, begun + for_what.seconds - time.monotonic())
        if select.select([0], [], [], min(left, _LOOK_SECONDS))[0]:
            return
        why = for_what.late if time.monotonic() - begun >= for_what.seconds else ""
        if roll is not None and (absent := roll.missing()):
            why = for_what.missed.format(absent)
        if for_what.launcher and parent_of(watched) not in (0, for_what.launcher):
            why = for_what.orphaned
        if why:
            with contextlib.suppress(OSError):  # whoever has read it may be gone, too
                os.write(2, f"{why}\n".encode(errors="replace"))
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched, signal.SIGKILL)
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's is the watched process's to answer
    watch(Watch(*json.loads(sys.argv[1])))
