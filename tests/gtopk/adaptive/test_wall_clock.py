"""Every second of the wall clock counts once, as computing or as waiting."""

from __future__ import annotations

import pytest

from gtopk.adaptive import local_steps
from tests.gtopk.adaptive.modelled_ranks import Clock


def test_wall_clock_counts_every_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(local_steps, "time", clock)
    counted = local_steps.WallClock()
    with counted.waiting():
        clock.now += 50  # before the beginning
    counted.begin()
    clock.now += 1
    counted.begin()  # continues
    with counted.waiting():
        clock.now += 2
    clock.now += 4
    assert counted.pop_computed() == [(150, 151), (153, 157)]
    with counted.waiting():
        clock.now += 8
    clock.now += 16
    assert counted.pop_waits() == [(151, 153), (157, 165)]
    assert (counted.pop_computed(), counted.pop_waits()) == ([(157, 157), (165, 181)], [])
