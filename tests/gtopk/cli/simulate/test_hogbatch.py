"""Modes with one model per node on a modelled cluster, in simulated seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from gtopk.adaptive.hogbatch.sizes import Thresholds
from gtopk.cli.simulate import render
from gtopk.cli.simulate.modes import SIMULATED
from gtopk.cli.simulate.setting import Classes, Cluster, Record, Setting, open_task

SLOW = range(1, 4)
CLUSTER = Cluster([1000, 100, 100, 100], overhead_seconds=1e-3, noise=0.03)
CLASSES = Classes((0,), 20e-3, {"slow": Thresholds(1, 64), "fast": Thresholds(16, 256)})
SETTING = Setting(
    CLUSTER, open_task("digits", 0), 0, 3, 256, 0.5, 0.0, None, classes=CLASSES, losses=True
)
MODES = ("equal-dense", "slow-only", "fast-only", "hogbatch", "adaptive-hogbatch")


@cache
def run(mode: str) -> Record:
    return SIMULATED[mode](SETTING)


def slow_share(record: Record) -> float:
    by_rank = [sum(column) for column in zip(*record.updates, strict=True)]
    return sum(by_rank[rank] for rank in SLOW) / sum(by_rank)


def test_adaptation_lowers_slow_class_updates_and_fast_class_utilisation() -> None:
    fixed, adaptive = run("hogbatch"), run("adaptive-hogbatch")
    assert slow_share(fixed) > 0.96
    assert 0.52 < slow_share(adaptive) < 0.81
    assert fixed.used["fast"] > 0.9
    assert 0.3 < adaptive.used["fast"] < fixed.used["fast"]
    assert adaptive.used["slow"] > 0.9


def test_hogbatch_is_faster_than_either_class_alone_or_common_steps() -> None:
    for mode in ("hogbatch", "adaptive-hogbatch"):
        for other in ("equal-dense", "slow-only"):
            assert run(mode).samples_per_second > run(other).samples_per_second
    assert run("hogbatch").samples_per_second > run("fast-only").samples_per_second


def test_every_mode_computes_every_sample_once_per_epoch() -> None:
    for mode in MODES[1:]:
        assert run(mode).samples == SETTING.epochs * SETTING.task.samples
        assert sum(map(sum, run(mode).updates)) == run(mode).steps


def test_staleness_is_zero_for_one_worker_and_grows_with_workers() -> None:
    assert run("fast-only").staleness == 0
    assert run("slow-only").staleness == pytest.approx(2, abs=0.05)
    assert run("hogbatch").staleness > 2


def test_epoch_reduces_loss_about_equally_in_every_mode() -> None:
    losses = [run(mode).loss[-1][1] for mode in MODES]
    assert max(losses) < 1.3 * min(losses)


def test_simulation_is_deterministic() -> None:
    short = replace(SETTING, epochs=1)
    simulate = SIMULATED["adaptive-hogbatch"]
    assert simulate(short) == simulate(short)


def test_table_shows_how_the_classes_trained() -> None:
    lines = render([run(mode) for mode in MODES], SETTING, 0.9)
    headings = next(number for number, line in enumerate(lines) if "slow's updates" in line)
    assert max(map(len, lines[headings:])) <= 80
    assert [line.split()[0] for line in lines[headings + 1 :][: len(MODES)]] == list(MODES)
