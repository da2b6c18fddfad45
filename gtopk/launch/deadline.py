"""An end to what no Python code can interrupt: MPI's start waits for ever for a rank that ended."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from collectives.environment import number

from . import watchdog

START_TIMEOUT: Final = "GTOPK_START_TIMEOUT"


def start_timeout_seconds() -> float:
    """Return the longest that a rank waits at the start for all to arrive."""
    return number(START_TIMEOUT, 120.0, "seconds")


@contextmanager
def deadline(seconds: float, late: str, *, launcher: int = 0, orphaned: str = "") -> Iterator[None]:
    """Say `late` on stderr and kill this process if the body takes longer; inf: however long.

    launcher: the process that started this one; when it is gone, say `orphaned`, and do the same.
    By a process of its own: the body may hold Python's lock all the while.
    """
    if seconds == math.inf and not launcher:
        yield
        return
    words = [str(seconds), late, str(launcher), orphaned]
    watch = subprocess.Popen(
        [sys.executable, "-IS", os.path.abspath(watchdog.__file__), *words], stdin=subprocess.PIPE
    )
    assert watch.stdin is not None
    try:
        yield
    finally:
        watch.stdin.close()
        watch.wait()
