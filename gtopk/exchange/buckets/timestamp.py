"""Timestamp: a point in time of a device's work: the host's, or that in a GPU's stream."""

from __future__ import annotations

import time

import torch


class Timestamp:
    """A point in a device's work; on a GPU, the time when its current stream gets there.

    A host clock would tell when the GPU's work was launched, not when it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: Timestamp) -> float:
        """Return the seconds from this time to a later one; waits until a GPU has reached it."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3
