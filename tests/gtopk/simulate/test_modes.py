"""What the modes are worth on a modelled cluster; simulated seconds, so figures can be asserted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gtopk.adaptive.policies import spread_of
from gtopk.simulate import delayed, joined, local_sgd, synchronous
from gtopk.simulate.cluster import Cluster, Slowdown
from gtopk.simulate.record import Record
from gtopk.simulate.setting import Setting
from gtopk.simulate.tasks import open_task

TASK = open_task("digits", 0)


def setting(speeds: list[float], exchange_seconds: float, epochs: int, **options: Any) -> Setting:
    cluster = Cluster(speeds, noise=0.03, exchange_seconds=exchange_seconds, **options)
    return Setting(cluster, TASK, 0, epochs, 256, 0.5, 0.0, 0.05, interval=5, micro_batch=8)


def steady(record: Record) -> float:
    """Return samples a second of the second half of the run."""
    half = record.sizes[len(record.sizes) // 2 :]
    seconds = half[-1][0] - half[0][0]
    return sum(sum(sizes) for _, sizes in half[1:]) / seconds


@pytest.mark.parametrize(
    ("speeds", "gain"), [([400, 200, 100, 100], 1.7), ([132, 120, 110, 100], 1.09)]
)
def test_balanced_batches_gain_what_their_speeds_allow(speeds: list[float], gain: float) -> None:
    at = setting(speeds, 0.1, epochs=7)
    equal, balanced = (synchronous.simulate(at, mode) for mode in ("equal", "balanced"))
    assert steady(balanced) > gain * steady(equal)
    assert [sum(s) for _, s in balanced.sizes] == [sum(s) for _, s in equal.sizes]
    # The same samples in the same steps: as good a model, up to what top-k keeps back.
    assert abs(balanced.final_accuracy - equal.final_accuracy) < 0.03


def test_dense_balanced_training_is_that_of_equal_batches() -> None:
    at = replace(setting([400, 100], 0.1, epochs=3), density=None)
    equal, balanced = (synchronous.simulate(at, mode) for mode in ("equal", "balanced"))
    assert balanced.sizes[-2][1] != equal.sizes[-2][1]
    assert [a for _, a in balanced.accuracy] == pytest.approx(
        [a for _, a in equal.accuracy], abs=0.003
    )


def test_a_rank_that_slows_fourfold_is_relieved_within_two_windows() -> None:
    at = setting([400, 200, 100, 100], 0.1, epochs=10, slowdowns=[Slowdown(0, 4.0, second=13.0)])
    record = synchronous.simulate(at, "balanced")
    whole = [(second, sizes) for second, sizes in record.sizes if sum(sizes) == 256]
    steps_after = [sizes for second, sizes in whole if second > 13.0]
    settled = steps_after[2 * (5 + 2)]
    seconds = [size / speed for size, speed in zip(settled, (100, 200, 100, 100), strict=True)]
    assert spread_of(seconds) < 0.15


def test_delayed_rounds_hide_an_exchange_as_long_as_the_computation() -> None:
    at = setting([400, 200, 100, 100], 0.32, epochs=6)
    balanced, rounds = synchronous.simulate(at, "balanced"), delayed.simulate(at)
    assert steady(rounds) > 1.3 * steady(balanced)
    assert rounds.least_utilisation > 0.98
    assert all(sum(sizes) >= at.global_batch for _, sizes in rounds.sizes)


def test_a_simulation_repeats_to_the_bit() -> None:
    at = setting([200, 100], 0.05, epochs=2)
    for simulate in (
        delayed.simulate,
        joined.simulate,
        local_sgd.simulate,
        lambda s: synchronous.simulate(s, "balanced"),
    ):
        assert simulate(at) == simulate(at)


def test_ranks_that_are_done_with_their_shard_take_part_with_nothing() -> None:
    record = joined.simulate(setting([300, 100], 0.0, epochs=2))
    epoch = [sizes for _, sizes in record.sizes[: record.steps // 2]]
    shares = [sum(sizes) for sizes in zip(*epoch, strict=True)]
    assert sum(shares) == len(TASK.y)
    assert shares[0] == pytest.approx(3 * shares[1], abs=3)
    assert {slow for _, slow in epoch[len(epoch) // 2 :]} == {0}
    # The fast rank waits in every step that the slow one is in, and computes the rest alone.
    together, alone = shares[1] / 100, (shares[0] - shares[1]) / 300
    assert record.seconds == pytest.approx(2 * (together + alone), rel=0.05)


def test_local_sgd_averages_now_and_then() -> None:
    at = setting([200, 100], 0.5, epochs=3)
    record = local_sgd.simulate(at)
    assert record.steps == 18
    assert record.exchange == pytest.approx(0.5 * 5)  # after every 8 steps, and every epoch of 6
    assert record.final_accuracy > 0.7
    assert all(before < after for (before, _), (after, _) in pairwise(record.accuracy))
