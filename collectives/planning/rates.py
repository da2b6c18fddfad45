"""Rates: how fast this machine selects, merges, encodes and decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from .formats import EXACT, Format


class CodingRate(NamedTuple):
    """Seconds that coding takes for an entry, checksum included."""

    encode_seconds: float
    decode_seconds: float


class Rates(NamedTuple):
    """Seconds per element and per entry, of the slowest rank.

    select_seconds: per element of the gradient: accumulate, select, clear the update's vector.
    merge_seconds:  per entry that goes into a merge, and to find out whose picks are alive.
    coding:         per entry, by format; a format that is not there is not offered.
    """

    select_seconds: float
    merge_seconds: float
    coding: Mapping[Format, CodingRate]

    def scaled(self, factor: float) -> Rates:
        """Return the rates of a machine that takes `factor` times as long."""
        coding = {f: CodingRate(*(factor * s for s in rate)) for f, rate in self.coding.items()}
        return Rates(factor * self.select_seconds, factor * self.merge_seconds, coding)


# What the NumPy kernels took on one core of an AMD EPYC 7003, where nothing is measured.
DEFAULT_RATES: Final = Rates(1.2e-9, 3.5e-8, {EXACT: CodingRate(1e-9, 3e-9)})
