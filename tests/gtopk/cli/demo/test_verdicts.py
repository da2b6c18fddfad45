"""The verdicts in words agree with the numbers, whichever method wins."""

from __future__ import annotations

import statistics

import pytest

from gtopk.cli.demo.verdicts import Record, accuracy_verdict, fraction, time_outcome


@pytest.mark.parametrize(
    ("seconds", "words", "loss"),
    [(16.0, "slower, a loss", True), (8.1, "the same within 3 %", False), (4.0, "faster", False)],
)
def test_time_verdict_compares_with_dense(
    records: list[Record], seconds: float, words: str, loss: bool
) -> None:
    dense, _, gtopk, _ = records
    gtopk["seconds"] = seconds
    assert time_outcome(gtopk, dense) == (words, loss)


def set_accuracy(record: Record, by_seed: list[float]) -> None:
    record["accuracy_by_seed"] = by_seed
    record["accuracy"], record["seeds"] = statistics.fmean(by_seed), len(by_seed)


@pytest.mark.parametrize(
    ("by_seed", "words", "loss"),
    [
        ([0.94, 0.95, 0.96], "equals that of dense (± 0.0, paired over 3 seeds)", False),
        ([0.93, 0.95, 0.970003], "equals that of dense (± 0.6, paired over 3 seeds)", False),
        (
            [0.93, 0.95, 0.957],
            "lies 0.4 points below dense (± 0.3, paired over 3 seeds), within two standard errors",
            False,
        ),
        (
            [0.95, 0.95, 0.963],
            "lies 0.4 points above dense (± 0.3, paired over 3 seeds), within two standard errors",
            False,
        ),
        (
            [0.96, 0.97, 0.983],
            "lies 2.1 points above dense (± 0.1, paired over 3 seeds), "
            "more than two standard errors",
            False,
        ),
        (
            [0.933, 0.945, 0.954],
            "lies 0.6 points below dense (± 0.1, paired over 3 seeds): a loss",
            True,
        ),
        (
            [0.9397, 0.9496, 0.9596],
            "lies 0.04 points below dense (± 0.00, paired over 3 seeds): a loss",
            True,
        ),
    ],
)
def test_accuracy_verdict_pairs_the_seeds(
    records: list[Record], by_seed: list[float], words: str, loss: bool
) -> None:
    dense, _, gtopk, _ = records
    set_accuracy(gtopk, by_seed)
    assert accuracy_verdict(gtopk, dense) == (words, loss)


def test_spread_shared_with_dense_does_not_excuse_a_shortfall(records: list[Record]) -> None:
    """Accuracy is 0.6 points lower at every seed; the seeds themselves differ by 4 points."""
    dense, _, gtopk, _ = records
    set_accuracy(dense, [0.91, 0.95, 0.99])
    set_accuracy(gtopk, [0.904, 0.945, 0.983])
    assert accuracy_verdict(gtopk, dense).loss


def test_noisy_method_loses_only_if_far_below_dense(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    set_accuracy(gtopk, [0.90, 0.96, 0.96])  # differences of -4, 1, 0 points: -1 ± 1.5
    assert not accuracy_verdict(gtopk, dense).loss
    set_accuracy(gtopk, [0.86, 0.92, 0.92])  # -8, -3, -4 points: -5 ± 1.5
    assert accuracy_verdict(gtopk, dense).loss


def test_any_shortfall_with_one_seed_is_a_loss(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    set_accuracy(dense, [0.95])
    for accuracy, words, loss in (
        (0.947, "lies 0.3 points below dense (one seed: the spread is unknown): a loss", True),
        (0.953, "lies 0.3 points above dense (one seed: the spread is unknown)", False),
        (0.95, "equals that of dense (95.0\xa0%)", False),
    ):
        set_accuracy(gtopk, [accuracy])
        assert accuracy_verdict(gtopk, dense) == (words, loss)


def test_bytes_are_shown_as_fraction_of_dense() -> None:
    assert (fraction(12_800.0, 480_000.0), fraction(1.25, 1.0)) == ("1/37.5", "1.25 times")
