"""Moment: a point in time of what works on tensors, the host or a GPU's stream."""

from __future__ import annotations

import time

import torch


class Moment:
    """Now, where a device works: on a GPU, current or not, when its stream has come to here.

    A host clock would tell when the GPU's work was launched, with all that is queued before it
    still to be done.
    """

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: Moment) -> float:
        """Return how long it took from here to there; waits until a GPU has come there."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3
