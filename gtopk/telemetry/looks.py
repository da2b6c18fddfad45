"""Looks: how large the residual is, now and then; to look reads all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from ..exchange.residual import ResidualSize
from .recorder import Recorder

_EVERY: Final = 50  # steps: a look takes about twice what a step's selection does


class BucketExchange(Protocol):
    """What holds something back."""

    def residual_size(self) -> ResidualSize | None: ...


def is_due(steps: int) -> bool:
    """Tell whether to look after so many steps: after 1, 2, 4, ... 32, and then every 50."""
    return steps % _EVERY == 0 or (steps < _EVERY and steps & (steps - 1) == 0)


def look(recorder: Recorder, bucket_exchanges: Sequence[BucketExchange]) -> None:
    """Note the norm of this rank's whole residual, and its age.

    The age is how many steps like the last would send as much: sum |residual| / sum |sent|. By
    Little's law that is how long what is sent has waited, on average, where nothing cancels out.
    """
    found = [
        each
        for bucket_exchange in bucket_exchanges
        if (each := bucket_exchange.residual_size()) is not None
    ]
    if not found:
        return
    square, mass, sent = map(sum, zip(*found, strict=True))
    recorder.note_residual(math.sqrt(square), mass / sent if sent else None)
