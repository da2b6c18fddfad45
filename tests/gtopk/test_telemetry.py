"""Where the time of a step went."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtopk.telemetry import PARTS, StepReport, parts
from tests.gtopk.made_runs import report

SECONDS = [f.name for f in dataclasses.fields(StepReport) if f.name.endswith("_seconds")]


@given(st.fixed_dictionaries({name: st.floats(0, 10) for name in SECONDS}))
def test_the_parts_are_never_negative_and_add_up_to_the_step(seconds: dict[str, float]) -> None:
    step = report(**seconds)
    found = parts(step)
    assert tuple(found) == PARTS
    assert all(value >= 0 for value in found.values())
    whole = step.compute_seconds + step.synchronize_seconds
    assert sum(found.values()) == pytest.approx(whole, abs=1e-9)


def test_a_step_without_overlap_is_told_as_it_was_measured() -> None:
    assert parts(report()) == pytest.approx(
        {
            "compute": 0.006,
            "select": 0.0012,
            "pack": 0.0003,
            "exchange": 0.0011,
            "merge": 0.0004,
            "wait": 0.004 - 0.0012 - 0.0003 - 0.0011 - 0.0004,
        }
    )


def test_what_backward_hides_is_no_part_of_the_step() -> None:
    half = parts(report(hidden_seconds=0.0015))
    assert half["exchange"] == pytest.approx(0.0011 / 2)
    assert half["select"] == pytest.approx(0.001 / 2 + 0.0002)
    assert half["compute"] == 0.006
