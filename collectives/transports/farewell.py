"""Farewell: what a rank that takes part no more tells its peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..vector import Array


class Farewell(NamedTuple):
    """How far a rank came, and why it left.

    completed: how many operations of each stream it has completed, by the stream's tag.
    """

    completed: Mapping[int, int]
    reason: str

    def encode(self) -> Array:
        """Return the message, uint8."""
        return np.frombuffer(json.dumps(self).encode(), np.uint8)

    @classmethod
    def decode(cls, message: Array) -> Farewell:
        """Return what `encode` made a message of."""
        completed, reason = json.loads(message.tobytes())
        return cls({int(tag): count for tag, count in completed.items()}, reason)
