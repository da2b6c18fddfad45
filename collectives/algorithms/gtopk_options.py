"""Options of a gtopk reduction, which all ranks must have in common besides k."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ..errors import MessageError
from ..vector import Array
from ..wire import EXACT, Format
from .conservation import PUT_BACK
from .growth import check_growth

MOST_PIECES: Final = 255


class GtopkOptions(NamedTuple):
    """The options of gtopk; equal on all ranks."""

    format: Format = EXACT
    growth: float = 1.0  # the last round keeps growth * k: wider updates for few more bytes
    put_back: str = "owners"  # or "spread": who gets what a merge drops
    pieces: int = 1  # more: a message's coding and merging overlap its travel, with more latency

    def checked(self) -> GtopkOptions:
        """Return the options; raise ValueError where one is out of bounds."""
        check_growth(self.growth)
        if self.put_back not in PUT_BACK:
            raise ValueError(
                f"put_back must be one of {', '.join(PUT_BACK)}; got {self.put_back!r}"
            )
        if not 1 <= self.pieces <= MOST_PIECES:
            raise ValueError(f"pieces must lie in 1..{MOST_PIECES}, got {self.pieces!r}")
        return self

    def stamp(self, piece: int = 0) -> Array:
        """Return what a message says of the options, uint8 [0 or 3]: nothing by default.

        k, growth and the format are in its header.
        """
        if (self.put_back, self.pieces) == ("owners", 1):
            return np.empty(0, np.uint8)
        return np.array([piece, self.pieces, PUT_BACK.index(self.put_back)], np.uint8)

    def check_stamp(self, received: Array, piece: int, sender: int) -> None:
        """Raise MessageError where a peer reduces with other options."""
        expected = self.stamp(piece)
        if received.tobytes() != expected.tobytes():
            raise MessageError(
                f"the message from rank {sender} has piece, pieces, put_back = "
                f"{received.tolist()} where this rank expects {expected.tolist()}; "
                "every rank must pass the same options"
            )
