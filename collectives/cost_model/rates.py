"""Rates: how fast this machine selects, merges, encodes and decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ..wire import WHOLE, Format
from .formats import FORMATS


class CodingRate(NamedTuple):
    """Seconds that coding takes for an entry: with its checksum, and what rounding left of it."""

    encode_seconds: float
    decode_seconds: float


class Rates(NamedTuple):
    """Seconds per element and per entry, of the slowest rank.

    select_seconds: per element of the gradient: accumulate, select, clear the update's vector.
    merge_seconds:  per entry that goes into a merge, and to find out whose picks are alive.
    coding:         per entry, by format; a format that is not there is not offered.
    swap_seconds:   of each list that is sent and merged with one that comes, whatever their
                    lengths: what the calls take, where all ranks make them at once.
    list_seconds:   the same of each list that is decoded besides.
    send_seconds:   the same of each list that is encoded and sent by itself, one after another.
    copy_seconds:   per element of a dense gradient: into one place, weighed, and back.
    sum_seconds:    per entry of lists that are added up in pairs, and go: ceil(log2) of them.
    pick_seconds:   per entry that is selected: into a list, out of the residual, into the update.
    """

    select_seconds: float
    merge_seconds: float
    coding: Mapping[Format, CodingRate]
    swap_seconds: float = 0.0
    list_seconds: float = 0.0
    copy_seconds: float = 0.0
    sum_seconds: float = 0.0
    pick_seconds: float = 0.0
    send_seconds: float = 0.0

    def coding_of(self, format: Format) -> CodingRate | None:
        """Return what an entry takes in a format; None where it was not measured.

        Where no indices travel, as where they travel raw: that is an upper bound, for what rounding
        takes is looked for entry by entry there.
        """
        return self.coding.get(
            format._replace(indices="raw") if format.indices == WHOLE else format
        )

    def without_calls(self) -> Rates:
        """Return what entries take alone."""
        return self._replace(swap_seconds=0.0, list_seconds=0.0, send_seconds=0.0)


# What the C++ core takes on one core of a server of the 2020s, rounded; where nothing is measured.
_INDEX_SECONDS: Final = {"raw": (2e-9, 3e-9), "blocks": (2e-9, 3e-9), "packed": (4.5e-9, 5e-9)}
_VALUE_SECONDS: Final = {
    "exact": (0.0, 0.0),
    "bf16": (1.6e-8, 5e-10),
    "fp16": (1.6e-8, 5e-10),
    "int8": (1.7e-8, 1e-9),
    "int4": (1.8e-8, 1.5e-9),
    "int3": (1.8e-8, 1.5e-9),
    "int2": (1.8e-8, 1.5e-9),
}
DEFAULT_RATES: Final = Rates(
    5e-10,
    1.1e-8,
    {
        format: CodingRate(
            *map(
                sum, zip(_INDEX_SECONDS[format.indices], _VALUE_SECONDS[format.values], strict=True)
            )
        )
        for format in FORMATS
    },
    3e-4,
    3e-5,
    3e-10,
    3e-9,
    1e-8,
    6e-5,
)
