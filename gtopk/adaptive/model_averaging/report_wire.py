"""Report wire: what a rank has done since the last merge, as a message to all ranks."""

from __future__ import annotations

import numpy as np

from collectives.vector import Array

from .weights import Report


def encode(report: Report, count: int) -> Array:
    """Return a report, and how far its rank has seen the cursor, as a message."""
    numbers = [report.size, report.updates, report.samples, report.finite, count]
    takes = [bound for take in report.takes for bound in (take.start, take.stop)]
    head = np.array([report.norm]).view(np.int64)
    return np.concatenate([head, np.array([*numbers, *takes], np.int64)]).view(np.uint8)


def decode(message: Array) -> tuple[Report, int]:
    """Return what `encode` made a message of."""
    numbers = message.view(np.int64)
    norm = float(numbers[:1].view(np.float64)[0])
    size, updates, samples, finite, count, *bounds = numbers[1:].tolist()
    takes = [range(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
    return Report(size, updates, samples, norm, bool(finite), takes), count
