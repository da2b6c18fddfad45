"""Plots put the records' numbers where they belong."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import pytest

from collectives.cost import Link
from gtopk.cli.charts import LEFT, RIGHT
from gtopk.cli.demo.plots import (
    accuracy_over_bytes,
    accuracy_over_epochs,
    loss_over_seconds,
    modelled_time_over_bandwidth,
    sent_and_accuracy,
    step_time_by_part,
)
from gtopk.cli.demo.verdicts import LATENCY_SECONDS, Record, modelled_step_seconds, pays_below


@pytest.mark.parametrize(
    "plot",
    [accuracy_over_epochs, accuracy_over_bytes, step_time_by_part, modelled_time_over_bandwidth],
)
def test_a_plot_is_well_formed_and_the_same_every_time(
    plot: Callable[[Sequence[Record]], str], records: list[Record]
) -> None:
    drawn = plot(records)
    assert ElementTree.fromstring(drawn).tag == "svg"
    assert drawn == plot(records)
    assert "nan" not in drawn


def test_bars_are_as_long_as_their_seconds(records: list[Record]) -> None:
    drawn = step_time_by_part(records)
    for part in ("compute", "select", "communicate"):
        widths = [
            float(width) for width in re.findall(rf'<rect class="{part}".*? width="(.*?)"', drawn)
        ]
        seconds = [record["step_seconds"][part] for record in records]
        assert widths == pytest.approx([s / 0.0035 * 480 for s in seconds], abs=0.1)


def test_bytes_add_up_to_those_of_the_whole_run(records: list[Record]) -> None:
    for record in records:
        sent, accuracy = sent_and_accuracy(record)[-1]
        assert sent == pytest.approx(record["bytes_per_step"] * record["steps"])
        assert accuracy == pytest.approx(record["accuracy"])


def test_methods_take_equal_time_at_the_break_even(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    bandwidth = pays_below(dense, gtopk)
    assert bandwidth is not None
    link = Link.of(bandwidth, LATENCY_SECONDS)
    assert modelled_step_seconds(dense, 0.002, link) == pytest.approx(
        modelled_step_seconds(gtopk, 0.002, link)
    )


def test_merging_moves_the_break_even_down(records: list[Record]) -> None:
    dense, _, gtopk, _ = records
    without = pays_below(dense, {**gtopk, "merge_seconds": 0.0})
    faster = pays_below(dense, gtopk)
    slower = pays_below(dense, {**gtopk, "merge_seconds": 0.003})
    assert without is not None
    assert faster is not None
    assert slower is not None
    assert slower < faster < without
    link = Link.of(1e9, LATENCY_SECONDS)
    merging = modelled_step_seconds(gtopk, 0.002, link)
    gtopk["merge_seconds"] += 0.25
    assert modelled_step_seconds(gtopk, 0.002, link) == pytest.approx(merging + 0.25)


def test_the_break_even_is_marked_as_about(records: list[Record]) -> None:
    assert re.search(
        r">about\s[1-9](\.[1-9]|0?0?)\s[MG]bit/s<", modelled_time_over_bandwidth(records)
    )


def test_a_break_even_outside_the_plot_is_not_drawn(records: list[Record]) -> None:
    assert "break-even" in modelled_time_over_bandwidth(records)
    records[2]["step_seconds"]["select"] = 1e9
    assert "break-even" not in modelled_time_over_bandwidth(records)


def test_losses_lie_over_the_seconds_of_training_on_one_axis_of_losses(
    linked: list[Record],
) -> None:
    here, there = [linked[0], linked[2]], linked[4:]
    drawn = [loss_over_seconds(pair, [*here, *there]) for pair in (here, there)]
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
