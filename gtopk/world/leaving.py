"""Leaving while an exception is handled: nobody can tell whether it will end the program.

In a `finally` it goes on its way, and the guard ends the job; in an `except` the program goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from .guard import Guard

_MOMENT_SECONDS: Final = 1.0  # what an exception gets to come out, before the others are told


class Leaving:
    """A rank that leaves the world in a moment, while its program goes on.

    close: leaves in good order; returns when every rank has left.
    guard: stays, for the exception to come out.
    """

    def __init__(self, close: Callable[[], object], guard: Guard) -> None:
        self.guard = guard
        self._close = close
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._leave, name="gtopk-leaving", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Leave now; return when every rank has left."""
        self._now.set()
        self._thread.join()
        self.guard.remove()

    def _leave(self) -> None:
        self._now.wait(_MOMENT_SECONDS)
        self._close()
        self.guard.retire()
