"""Standard streams, of which a daemon or a supervisor may have closed some."""

from __future__ import annotations

import contextlib
import os
import sys


def occupy_closed_descriptors() -> None:
    """Open what is closed of descriptors 0, 1 and 2 on the null device.

    Else a socket or a pipe that is opened next gets such a number, and a child process, which has
    its own standard streams there, does not inherit it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def flush() -> None:
    """Flush stdout and stderr, as far as this process has them."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # the reader is gone; closed
                stream.flush()
