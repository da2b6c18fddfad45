"""Findings in words follow the numbers, whoever wins."""

from __future__ import annotations

import pytest

from gtopk.demo.record import Record
from gtopk.demo.verdicts import (
    accuracy_verdict,
    bytes_verdict,
    model_verdict,
    time_verdict,
)


@pytest.mark.parametrize(
    ("seconds", "words", "loss"),
    [
        (16.0, "2 times as long as dense: slower, a loss", True),
        (8.1, "1.01 times as long as dense: the same within 3 %", False),
        (4.0, "0.50 times as long as dense: faster", False),
    ],
)
def test_time_is_judged_beside_dense(
    records: list[Record], seconds: float, words: str, loss: bool
) -> None:
    dense, _, gtopk, _ = records
    gtopk["seconds"] = seconds
    assert time_verdict(gtopk, dense) == (words, loss)


@pytest.mark.parametrize(
    ("accuracy", "words", "loss"),
    [
        (0.95, "equals that of dense (95.0\xa0%)", False),
        (0.945, "lies 0.5 points below dense, within the spread over seeds (1.0 points)", False),
        (0.955, "lies 0.5 points above dense, within the spread over seeds (1.0 points)", False),
        (0.98, "lies 3.0 points above dense, more than the spread over seeds (1.0 points)", False),
        (
            0.9,
            "lies 5.0 points below dense, more than the spread over seeds (1.0 points): a loss",
            True,
        ),
    ],
)
def test_accuracy_is_judged_by_the_spread_over_seeds(
    records: list[Record], accuracy: float, words: str, loss: bool
) -> None:
    dense, _, gtopk, _ = records
    gtopk["accuracy"] = accuracy
    assert accuracy_verdict(gtopk, dense) == (words, loss)


def test_one_seed_has_no_spread_to_excuse_it(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    for record, accuracy in ((dense, 0.95), (gtopk, 0.94)):
        record["seeds"], record["accuracy"], record["accuracy_by_seed"] = 1, accuracy, [accuracy]
    words, loss = accuracy_verdict(gtopk, dense)
    assert "one seed: no spread" in words
    assert loss


def test_more_bytes_than_dense_are_a_loss(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    assert bytes_verdict(gtopk, dense) == ("1/37.5 of dense's bytes", False)
    gtopk["bytes_per_step"] = 1.25 * dense["bytes_per_step"]
    assert bytes_verdict(gtopk, dense) == ("1.25 times dense's bytes: a loss", True)


def test_the_model_says_where_it_pays(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    assert "is faster than dense below" in model_verdict(dense, gtopk).words
    gtopk["step_seconds"]["select"] = 0.0
    assert "faster than dense at every bandwidth" in model_verdict(dense, gtopk).words
    gtopk["step_seconds"]["select"] = 1e9
    words, loss = model_verdict(dense, gtopk)
    assert "slower than dense at every bandwidth" in words
    assert loss
