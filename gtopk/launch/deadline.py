"""An end to what no Python code can interrupt: MPI's start waits for ever for a rank that ended."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from . import watchdog
from .watchdog import Lookout

_LEAVES_SECONDS: Final = 10.0  # that the watchdog gets to end when it is told to


@contextmanager
def deadline(lookout: Lookout) -> Iterator[None]:
    """Kill this process, and say why, should what is looked for come before the body ends.

    By a process of its own: the body may hold Python's lock all the while.
    """
    if lookout.seconds == math.inf and not lookout.launcher and lookout.roll is None:
        yield
        return
    program = os.path.abspath(watchdog.__file__)
    dog = subprocess.Popen(
        [sys.executable, "-IS", program, json.dumps(lookout)], stdin=subprocess.PIPE
    )
    assert dog.stdin is not None
    try:
        yield
    finally:
        dog.stdin.close()
        try:
            dog.wait(_LEAVES_SECONDS)
        except subprocess.TimeoutExpired:  # it reads in /proc, where a page fault may hold it up
            dog.kill()
