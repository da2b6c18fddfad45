"""The parts of a step's time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtopk.telemetry.step_report import PARTS, Balance, StepReport, parts
from tests.gtopk.made_runs import report

SECONDS = [f.name for f in dataclasses.fields(StepReport) if f.name.endswith("_seconds")]


@given(st.fixed_dictionaries({name: st.floats(0, 10) for name in SECONDS}))
def test_parts_are_nonnegative_and_add_up_to_the_step(seconds: dict[str, float]) -> None:
    step = report(**seconds)
    found = parts(step)
    assert tuple(found) == PARTS
    assert all(value >= 0 for value in found.values())
    total_seconds = step.compute_seconds + step.synchronize_seconds
    assert sum(found.values()) == pytest.approx(total_seconds, abs=1e-9)


def test_printed_report_shows_three_digits_of_each_number() -> None:
    shown = f"{report(7, compute_seconds=1 / 3, samples=None, gradient_norm=200 / 3)}"
    assert shown.startswith("StepReport(step=7, algorithm='gtopk', compute_seconds=0.333, ")
    assert "sent_bytes=1200, " in shown
    assert "samples=None, " in shown
    assert shown.endswith("gradient_norm=66.7)")


def test_parts_without_overlap_equal_the_measured_times() -> None:
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


def test_parts_exclude_time_hidden_behind_backward() -> None:
    half = parts(report(hidden_seconds=0.0015))
    assert half["exchange"] == pytest.approx(0.0011 / 2)
    assert half["select"] == pytest.approx(0.001 / 2 + 0.0002)
    assert half["compute"] == 0.006


@pytest.mark.parametrize(
    ("dense_seconds", "expected"),
    [
        (1.003, "compression saved up to 100 s of 101 s against dense (by estimate); used"),
        (0.00305, "neither saved nor cost time in 1 s (dense by estimate); used"),
        (0.001, "(dense by estimate): dense is faster here; used"),
    ],
)
def test_verdict_says_whether_compression_saved_time(dense_seconds: float, expected: str) -> None:
    balance = Balance()
    for step in range(100):
        balance.note(report(step, dense_seconds=dense_seconds))
    text = balance.verdict().replace("\N{NO-BREAK SPACE}", " ")
    assert expected in text
    assert text.endswith(
        "used gtopk, density 0.001, wire 48 bits an entry; accuracy: compare with a dense run"
    )


@pytest.mark.parametrize(
    ("hidden_seconds", "expected"),
    [
        (0.003, "compression neither saved nor cost time in 1 s (dense by estimate)"),
        (0.0015, "compression cost up to 150 ms of 1 s "),
        (0.0, "compression cost up to 200 ms of 1 s "),
    ],
)
def test_verdict_excludes_time_hidden_behind_backward(hidden_seconds: float, expected: str) -> None:
    balance = Balance()
    for step in range(100):  # of 3 ms each
        balance.note(report(step, dense_seconds=0.001, hidden_seconds=hidden_seconds))
    assert balance.verdict().replace("\N{NO-BREAK SPACE}", " ").startswith(expected)


def test_step_with_a_count_weighs_as_many_steps() -> None:
    one, many = Balance(), Balance()
    for balance, counts in ((one, [1] * 10), (many, [5, 5])):
        for count in counts:
            balance.note(report(dense_seconds=1.0), count)
    assert one.verdict() == many.verdict() != ""


def test_verdict_is_empty_without_predictions() -> None:
    balance = Balance()
    balance.note(report())
    balance.note(report(dense_seconds=1.0, skipped=True))
    assert balance.verdict() == ""


@pytest.mark.parametrize("dense_seconds", [0.001, 1.0])
def test_dense_steps_count_as_neither_saving_nor_cost(dense_seconds: float) -> None:
    """In Compression.auto the measured time of a dense step is dense's, whatever was predicted."""
    dense, mixed, alone = Balance(), Balance(), Balance()
    for step in range(50):
        dense.note(report(step, algorithm="dense", dense_seconds=dense_seconds))
    assert dense.verdict() == ""
    for step in range(50):
        alone.note(report(step, compute_seconds=0.0, dense_seconds=0.005))
        mixed.note(report(step, compute_seconds=0.0, dense_seconds=0.005))
        mixed.note(report(step, algorithm="dense", dense_seconds=dense_seconds))
    texts = [each.verdict().replace("\N{NO-BREAK SPACE}", " ") for each in (alone, mixed)]
    assert [each.partition(" of ")[0] for each in texts] == ["compression saved up to 100 ms"] * 2
    assert "; used gtopk, " in texts[1]


@pytest.mark.parametrize(("predicted_seconds", "dense_seconds"), [(0.0001, 0.001), (0.03, 0.01)])
def test_verdict_is_undecided_if_prediction_was_far_off(
    predicted_seconds: float, dense_seconds: float
) -> None:
    """Both use one estimate for dense; if the running algorithm's was wrong, dense's may be too."""
    balance = Balance()
    balance.note(report(dense_seconds=dense_seconds, predicted_seconds=None))
    for step in range(1, 100):
        balance.note(report(step, dense_seconds=dense_seconds, predicted_seconds=predicted_seconds))
    text = balance.verdict()
    assert text.startswith("cannot tell whether compression saved time: an exchange took 3")
    assert "; time a dense run; used gtopk" in text


def test_warmup_without_predictions_leaves_verdict_decided() -> None:
    balance = Balance()
    for predicted, took, count in ((None, 0.52, 95), (0.1, 0.1, 5)):
        step = report(exchange_seconds=took, dense_seconds=0.2, predicted_seconds=predicted)
        balance.note(step, count)
    assert balance.verdict().startswith("compression cost up to 29.9")
