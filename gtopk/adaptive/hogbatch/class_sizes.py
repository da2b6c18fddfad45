"""Class sizes: the smallest batch of each device class, as the first of its workers has found it.

What a probe finds is as noisy as the seconds it goes by, and workers of a class that find unlike
sizes are unlike ever after. So they have one:

    worker   0  probes ... finds 16, says so           16
             1  probes ......... (would find 64)       16, from its next batch on
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.transports.node_memory import NodeMemory

from .board import Board
from .device_classes import CLASSES, DeviceClass


class ClassSizes:
    """One worker's view."""

    def __init__(self, memory: NodeMemory, board: Board, device_class: DeviceClass) -> None:
        self._memory = memory
        self._said: np.ndarray[Any, Any] = board.head["smallest"][0]  # by class; 0: nobody has yet
        self._class = device_class
        self._mine = [*CLASSES].index(device_class.name)

    @property
    def found(self) -> int | None:
        """Return the smallest batch of this worker's class; None while nobody has found it."""
        return int(self._said[self._mine]) or None

    def agree(self, size: int) -> int:
        """Return the class's smallest batch, which this is unless another worker was first.

        A slow class has none above a fast one's.
        """
        with self._memory.lock():
            if not self.found:
                self._said[self._mine] = self._beside_others(size)
            return int(self._said[self._mine])

    def _beside_others(self, size: int) -> int:
        is_fast = self._class.is_fast
        said = zip(CLASSES.values(), self._said, strict=True)
        others = [int(smallest) for c, smallest in said if smallest and c.is_fast != is_fast]
        return max([size, *others]) if is_fast else min([size, *others])
