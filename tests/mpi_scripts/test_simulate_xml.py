"""Strategies are compared on rows labelled synthetic, in seconds labelled simulated."""

from __future__ import annotations

import argparse

import pytest

from mpi_scripts import simulate_xml

TINY = [
    *("--speeds", "300:100", "--epochs", "1", "--batch", "8", "--rows", "96", "--test-rows", "40"),
    *("--features", "64", "--labels", "20", "--hidden", "4", "--target", "0.01"),
]


def test_every_strategy_has_a_row_at_its_best_learning_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulate_xml.main([*TINY, "--lr", "0.01", "0.5", "--seeds", "2", "--merge-momentum", "0.5"])
    printed = capsys.readouterr().out
    assert printed.startswith("Synthetic rows")
    assert "Simulated, not measured: 2 ranks of 300:100 samples/s" in printed
    rows = {line.split()[0] for line in printed.splitlines() if " 0.5 " in line or " 0.01 " in line}
    assert rows >= set(simulate_xml.STRATEGIES)


def test_batch_cost_follows_its_number_of_entries() -> None:
    options: argparse.Namespace = simulate_xml.parse(TINY)
    task = simulate_xml.XmlTask(options, seed=0)
    everything = task.work_of(range(task.samples))
    assert everything == pytest.approx(task.samples)
    longest = max(range(task.samples), key=lambda row: task.work_of([row]))
    assert task.work_of([longest]) > 1.3
    assert simulate_xml.parse(["--speeds", "200"]).speeds == [200.0]
