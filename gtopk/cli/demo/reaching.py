"""Reaching: after how many epochs a method's mean accuracy first comes near to dense's end.

Sparse curves rise later than dense's, which the accuracy at the end does not show.
"""

from __future__ import annotations

import math
import statistics

from .record import Record

BELOW = 0.01  # of dense's accuracy at the end, rounded down to a whole per cent


def level(dense: Record) -> float:
    """Return the accuracy to reach: of 0.972 at dense's end, 0.96."""
    return math.floor(100 * (dense["accuracy"] - BELOW) + 1e-9) / 100


def epochs_to(accuracy: float, record: Record) -> int | None:
    """Return after how many epochs the mean over seeds first is that; None: after none."""
    by_epoch = zip(*record["accuracy_by_epoch"], strict=True)
    means = enumerate(map(statistics.fmean, by_epoch), start=1)
    return next((epoch for epoch, mean in means if mean >= accuracy - 1e-9), None)


def epochs_text(accuracy: float, record: Record) -> str:
    """Return it as "19", or as "> 30"."""
    found = epochs_to(accuracy, record)
    return f"> {record['epochs']}" if found is None else str(found)


def heading(accuracy: float, space: str = " ") -> str:
    """Return "Epochs to 96 %"."""
    return f"Epochs{space}to {100 * accuracy:.0f} %"
