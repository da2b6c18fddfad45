"""Departure notice: a rank's last message to its peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..vector import Array


class DepartureNotice(NamedTuple):
    """The operations that a rank has completed, and why it left.

    completed: number of completed operations of each stream, by the stream's tag.
    missed:    the rank whose departure made this one leave, and its notice, so that a rank that
               gets this notice first also learns the cause.
    lost:      True if the rank sent no notice: its connection broke, so it died or is unreachable.
    """

    completed: Mapping[int, int]
    reason: str
    missed: tuple[int, DepartureNotice] | None = None
    lost: bool = False

    def encode(self) -> Array:
        """Return the message, uint8."""
        return np.frombuffer(json.dumps(self).encode(), np.uint8)

    @classmethod
    def decode(cls, message: Array) -> DepartureNotice:
        """Parse a message made by `encode`."""
        return cls._of(*json.loads(message.tobytes()))

    @classmethod
    def _of(
        cls, completed: dict[str, int], reason: str, missed: Any, lost: bool
    ) -> DepartureNotice:
        # JSON turns keys into strings.
        counts = {int(tag): count for tag, count in completed.items()}
        return cls(counts, reason, missed and (missed[0], cls._of(*missed[1])), lost)
