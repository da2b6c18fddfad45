"""What an exchange is expected to take is the model's time of what was asked for."""

from __future__ import annotations

from collectives.cost import Link
from collectives.planning import DEFAULT_RATES, Calibration, Network
from gtopk.compression import Compression
from gtopk.expectation import expected

HERE = Calibration(Network(8, Link.of(1e9, 50e-6)), DEFAULT_RATES, "made up")
LENGTH = 25_557_032


def test_what_chooses_by_itself_is_not_foretold() -> None:
    assert expected(Compression.auto(density=0.01), LENGTH, HERE) is None
    dense = expected(Compression.none, LENGTH, HERE)
    gtopk = expected(Compression.gtopk(density=0.001), LENGTH, HERE)
    assert dense is not None
    assert gtopk is not None
    assert gtopk.seconds < dense.seconds
