"""Watchdog: ends a process that takes too long to start, or whose launcher is gone meanwhile.

A program of its own, and of the standard library alone (deadline.py starts it): what it watches may
hold Python's lock all the while. It ends when its stdin does.

Arguments: the seconds, what to say when they are over, the launcher's process (0: none is looked
for), what to say when that is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import Final

_LOOK_SECONDS: Final = 0.3


def parent_of(pid: int) -> int:
    """Return the process that started another one, or has adopted it; 0 where that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def watch(seconds: float, late: str, launcher: int, orphaned: str) -> None:
    """Return when stdin is closed; before, should it come to that, end this process's parent."""
    watched, begun = os.getppid(), time.monotonic()
    while True:
        left = max(0.0, begun + seconds - time.monotonic())
        if select.select([0], [], [], min(left, _LOOK_SECONDS))[0]:
            return
        why = late if time.monotonic() - begun >= seconds else ""
        if launcher and parent_of(watched) not in (0, launcher):
            why = orphaned
        if why:
            with contextlib.suppress(OSError):  # whoever has read it may be gone, too
                os.write(2, f"{why}\n".encode(errors="replace"))
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched, signal.SIGKILL)
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's is the watched process's to answer
    watch(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
