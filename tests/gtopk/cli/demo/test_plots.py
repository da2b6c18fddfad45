"""Plots show the records' numbers at the right positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import pytest

from gtopk.cli.charts import LEFT, LETTER, RIGHT, WIDTH
from gtopk.cli.demo.page import (
    accuracy_over_bytes,
    accuracy_over_epochs,
    loss_over_seconds,
    sent_and_accuracy,
    step_time_by_part,
)
from gtopk.cli.demo.verdicts import Record


@pytest.mark.parametrize("plot", [accuracy_over_epochs, accuracy_over_bytes, step_time_by_part])
def test_plot_is_well_formed_and_deterministic(
    plot: Callable[[Sequence[Record]], str], records: list[Record]
) -> None:
    drawn = plot(records)
    assert ElementTree.fromstring(f"<div>{drawn}</div>")[-1].tag == "svg"  # below its legend
    assert drawn == plot(records)
    assert "nan" not in drawn


def test_bar_lengths_are_proportional_to_seconds(records: list[Record]) -> None:
    drawn = step_time_by_part(records)
    for part in ("compute", "select", "communicate"):
        widths = [
            float(width)
            for width in re.findall(rf'<rect class="part {part}".*? width="(.*?)"', drawn)
        ]
        seconds = [record["step_seconds"][part] for record in records]
        assert widths == pytest.approx([s / 0.0035 * (480 - 145 - 68) for s in seconds], abs=0.1)


def test_words_below_a_bar_fit_within_the_drawing(records: list[Record]) -> None:
    drawn = step_time_by_part(records)
    captions = re.findall(r'class="tick" x="([0-9.]+)" y="[0-9.]+">(compute [^<]+)<', drawn)
    assert len(captions) == len(records)
    for x, words in captions:
        assert float(x) + LETTER * len(words) <= WIDTH


def test_bytes_over_epochs_add_up_to_the_whole_run(records: list[Record]) -> None:
    for record in records:
        sent, accuracy, *_ = sent_and_accuracy(record)[-1]
        assert sent == pytest.approx(record["bytes_per_step"] * record["steps"])
        assert accuracy == pytest.approx(record["accuracy"])


def test_losses_over_seconds_share_one_axis_of_losses(
    linked: list[Record],
) -> None:
    here, there = [linked[0], linked[2]], linked[4:]
    labels = [record["label"] for record in linked[:4]]
    drawn = [loss_over_seconds(pair, [*here, *there], labels) for pair in (here, there)]
    ends = []
    for each in drawn:
        assert ElementTree.fromstring(each).tag == "svg"
        lines = re.findall(r'class="line" d="M([^"]+)"', each)
        ends.append([[float(n) for n in line.split("L")[-1].split()] for line in lines])
    (dense, gtopk), (dense_there, gtopk_there) = ends
    assert [x for x, _ in (gtopk, dense_there)] == [RIGHT, RIGHT]  # the slower one ends the axis
    assert dense[0] - LEFT == pytest.approx((RIGHT - LEFT) * 8 / 12, abs=0.1)
    assert gtopk_there[0] - LEFT == pytest.approx((RIGHT - LEFT) * 6 / 24, abs=0.1)
    assert {y for _, y in (dense, gtopk, dense_there, gtopk_there)} == {dense[1]}
    assert "emulated link of 100 Mbit/s" in drawn[1]
    assert "emulated" not in drawn[0]
