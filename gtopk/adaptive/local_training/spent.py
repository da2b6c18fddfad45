"""Spent: where a rank's time goes, between the steps of a mode that steps as it can.

|-- computed --|waits|----- computed -----|waits|-- computed --   all of the wall clock, once
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...runtime.coordinator import Operation

Bounds = tuple[float, float]  # from, to; by time.perf_counter


class Spent:
    """Splits the wall clock into waiting for others, and all else, which counts as computing.

    Law: what was taken adds up to the time from `begin` to the last `take_computed`, or wait.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # what was before is computed, waited or taken
        self._computed: list[Bounds] = []
        self._waits: list[Bounds] = []

    def begin(self) -> None:
        """Count from now on; where that was said before, go on."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what is done meanwhile as waiting for others; not within another such time."""
        began = self._pass()
        try:
            yield
        finally:
            if self._since is not None:
                self._since = time.perf_counter()
                self._waits.append((began, self._since))

    def take_computed(self) -> list[Bounds]:
        """Return when was not waited since this was asked last."""
        self._pass()
        computed, self._computed = self._computed, []
        return computed

    def take_waits(self) -> list[Bounds]:
        """Return when was waited since this was asked last."""
        waits, self._waits = self._waits, []
        return waits

    def _pass(self) -> float:
        now = time.perf_counter()
        if self._since is not None:
            self._computed.append((self._since, now))
            self._since = now
        return now


class Waited:
    """An operation, the waiting for which is counted."""

    def __init__(self, operation: Operation, spent: Spent) -> None:
        self._operation, self._spent = operation, spent

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._operation.done

    def wait(self) -> Any:
        """Return the result, or raise what the operation raises."""
        with self._spent.waiting():
            return self._operation.wait()
