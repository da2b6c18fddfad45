"""Clocks are synchronized without a common clock."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gtopk.runtime.coordinator import clocks
from gtopk.runtime.coordinator.clocks import Offset, clock_offset


def test_ranks_on_one_host_have_no_clock_offset(threads: Any) -> None:
    assert threads(3, lambda transport: clock_offset(transport)) == [Offset()] * 3


@pytest.mark.parametrize("size", [2, 5])
def test_clock_offset_measures_a_clock_that_is_ahead(
    monkeypatch: pytest.MonkeyPatch, threads: Any, size: int
) -> None:
    import threading

    ahead = threading.local()
    real = time.perf_counter

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return real() + getattr(ahead, "seconds", 0.0)

    monkeypatch.setattr(clocks, "time", Time)
    monkeypatch.setattr(clocks, "machine", lambda: f"host {ahead.rank // 2}")

    def program(transport: Any) -> Offset:
        ahead.rank, ahead.seconds = transport.rank, 7.0 * transport.rank
        return clock_offset(transport)

    for rank, offset in enumerate(threads(size, program)):
        if rank < 2:
            assert offset == Offset()  # as if on rank 0's host
            continue
        assert abs(offset.ahead_seconds - 7.0 * rank) <= offset.uncertain_seconds
        assert offset.uncertain_seconds < 7.0
