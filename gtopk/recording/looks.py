"""Looks: how much is held back, now and then; to look reads all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from ..residual import Withheld
from .recorder import Recorder

EVERY: Final = 20  # steps: a look reads twice what a step's selection reads and writes


class Lane(Protocol):
    """What holds something back."""

    def withheld(self) -> Withheld | None: ...


def look(recorder: Recorder, lanes: Sequence[Lane]) -> None:
    """Note the norm of all that this rank holds back, and its age.

    The age is how many steps like the last would send as much: sum |held back| / sum |sent|. By
    Little's law that is how long what is sent has waited, on average, where nothing cancels out.
    """
    found = [each for lane in lanes if (each := lane.withheld()) is not None]
    if not found:
        return
    square, mass, sent = map(sum, zip(*found, strict=True))
    recorder.note_withheld(math.sqrt(square), mass / sent if sent else None)
