"""An end to what no Python code can interrupt: MPI's start waits for ever for a rank that ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from collectives.environment import number

START_TIMEOUT: Final = "GTOPK_START_TIMEOUT"

# Ends its parent, with a word, unless its stdin is closed in time.
_WATCH: Final = (
    "import os, select, sys; seconds, text, parent = sys.argv[1:]\n"
    "if not select.select([0], [], [], float(seconds))[0]:\n"
    "    os.write(2, text.encode(errors='replace')); os.kill(int(parent), 9)"
)


def start_timeout_seconds() -> float:
    """Return the longest that a rank waits at the start for all to arrive."""
    return number(START_TIMEOUT, 120.0, "seconds")


@contextmanager
def deadline(seconds: float, text: str) -> Iterator[None]:
    """Say `text` on stderr and kill this process if the body takes longer.

    By a process of its own: the body may hold Python's lock all the while.
    """
    watch = subprocess.Popen(
        [sys.executable, "-IS", "-c", _WATCH, str(seconds), f"{text}\n", str(os.getpid())],
        stdin=subprocess.PIPE,
    )
    assert watch.stdin is not None
    try:
        yield
    finally:
        watch.stdin.close()
        watch.wait()
