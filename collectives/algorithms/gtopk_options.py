"""Options of a gtopk reduction, which all ranks must have in common besides k."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import MessageError
from ..vector import Array
from ..wire import EXACT, Format
from .conservation import PUT_BACK
from .growth import check_growth


class GtopkOptions(NamedTuple):
    """The options of gtopk; equal on all ranks."""

    format: Format = EXACT
    growth: float = 1.0  # the last round keeps growth * k: wider updates for few more bytes
    put_back: str = "owners"  # or "spread": who gets what a merge drops

    def checked(self) -> GtopkOptions:
        """Return the options; raise ValueError where one is out of bounds."""
        check_growth(self.growth)
        if self.put_back not in PUT_BACK:
            raise ValueError(
                f"put_back must be one of {', '.join(PUT_BACK)}; got {self.put_back!r}"
            )
        return self

    def stamp(self) -> Array:
        """Return what a message says of the options, uint8 [0 or 1]: nothing by default.

        k, growth and the format are in its header.
        """
        number = PUT_BACK.index(self.put_back)
        return np.array([number] if number else [], np.uint8)

    def check_stamp(self, received: Array, sender: int) -> None:
        """Raise MessageError where a peer reduces with other options."""
        expected = self.stamp()
        if received.tobytes() != expected.tobytes():
            raise MessageError(
                f"the message from rank {sender} has put_back = {received.tolist()} where this "
                f"rank expects {expected.tolist()} (places in {', '.join(PUT_BACK)}); every rank "
                "must pass the same options"
            )
