"""The modes on a modelled cluster; seconds are simulated, so tests can assert them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from gtopk.adaptive.throughput import spread_of
from gtopk.cli.simulate import delayed, modes
from gtopk.cli.simulate.modes import SIMULATED
from gtopk.cli.simulate.setting import Cluster, Death, Record, Setting, Slowdown, open_task

TASK = open_task("digits", 0)


def setting(speeds: list[float], exchange_seconds: float, epochs: int, **options: Any) -> Setting:
    cluster = Cluster(speeds, noise=0.03, exchange_seconds=exchange_seconds, **options)
    return Setting(cluster, TASK, 0, epochs, 256, 0.5, 0.0, 0.05, interval=5, micro_batch=8)


def steady(record: Record) -> float:
    """Return samples per second in the second half of the run."""
    half = record.sizes[len(record.sizes) // 2 :]
    seconds = half[-1][0] - half[0][0]
    return sum(sum(sizes) for _, sizes in half[1:]) / seconds


@pytest.mark.parametrize(
    ("speeds", "gain"), [([400, 200, 100, 100], 1.7), ([132, 120, 110, 100], 1.09)]
)
def test_balanced_batches_gain_what_their_speeds_allow(speeds: list[float], gain: float) -> None:
    at = setting(speeds, 0.1, epochs=7)
    equal, balanced = (modes.train_in_steps(at, mode) for mode in ("equal", "balanced"))
    assert steady(balanced) > gain * steady(equal)
    assert [sum(s) for _, s in balanced.sizes] == [sum(s) for _, s in equal.sizes]
    # The same samples in the same steps give an equally good model, up to top-k's residuals.
    assert abs(balanced.final_accuracy - equal.final_accuracy) < 0.03


def test_dense_balanced_training_equals_that_of_equal_batches() -> None:
    at = replace(setting([400, 100], 0.1, epochs=3), density=None)
    equal, balanced = (modes.train_in_steps(at, mode) for mode in ("equal", "balanced"))
    assert balanced.sizes[-2][1] != equal.sizes[-2][1]
    assert [a for _, a in balanced.accuracy] == pytest.approx(
        [a for _, a in equal.accuracy], abs=0.003
    )


def test_rank_that_slows_fourfold_is_rebalanced_within_two_windows() -> None:
    at = setting([400, 200, 100, 100], 0.1, epochs=10, slowdowns=[Slowdown(0, 4.0, second=13.0)])
    record = modes.train_in_steps(at, "balanced")
    full_steps = [(second, sizes) for second, sizes in record.sizes if sum(sizes) == 256]
    steps_after = [sizes for second, sizes in full_steps if second > 13.0]
    settled = steps_after[2 * (5 + 2)]
    seconds = [size / speed for size, speed in zip(settled, (100, 200, 100, 100), strict=True)]
    assert spread_of(seconds) < 0.15


def test_goodput_hides_a_long_exchange_behind_larger_batches() -> None:
    at = replace(
        setting([400, 200, 100, 100], 0.3, epochs=3),
        global_batch=64,
        learning_rate=0.125,
        interval=3,
        max_batch=200,
    )
    balanced, goodput = (SIMULATED[mode](at) for mode in ("balanced", "goodput"))
    assert steady(goodput) > 1.2 * steady(balanced)
    assert 64 < max(sum(sizes) for _, sizes in goodput.sizes) <= 200
    probes = -(-goodput.steps // 6)  # dense exchanges, every two windows
    assert goodput.exchange == pytest.approx(0.3 * (goodput.steps + probes))


def test_delayed_rounds_hide_an_exchange_as_long_as_the_computation() -> None:
    at = setting([400, 200, 100, 100], 0.32, epochs=6)
    balanced, rounds = modes.train_in_steps(at, "balanced"), delayed.simulate(at)
    assert steady(rounds) > 1.3 * steady(balanced)
    assert rounds.least_utilisation > 1.3 * min(balanced.busy) / balanced.seconds


def test_delayed_rounds_end_with_each_epoch() -> None:
    """As in `hvd.adapt`, each epoch covers every sample once."""
    at = setting([400, 200, 100, 100], 0.32, epochs=4)
    record = delayed.simulate(at)
    totals = [sum(sizes) for _, sizes in record.sizes]
    ends = set(accumulate(totals))
    assert {epoch * len(TASK.y) for epoch in range(1, 5)} <= ends
    assert (record.samples, max(ends)) == (4 * len(TASK.y), 4 * len(TASK.y))
    assert len(record.accuracy) == 4  # all updates of an epoch are applied before the next one
    # By then all ranks wait for the last round of a pass.
    after = {round(second + 0.32, 9) for second, _ in record.sizes}
    assert {round(second, 9) for second, _ in record.accuracy} <= after


def test_pass_ends_when_all_computed_gradients_are_applied() -> None:
    task = TASK._replace(x=TASK.x[:16], y=TASK.y[:16])
    cluster = Cluster([80, 40], exchange_seconds=0.5)
    at = replace(setting([1, 1], 0.0, epochs=1), cluster=cluster, task=task, global_batch=16)
    record = delayed.simulate(at)  # one micro-batch for each rank
    assert [sizes for _, sizes in record.sizes] == [[8, 8]]
    # Signals of all ranks: the pass begins, ready (twice), nothing to reduce, the pass ends.
    assert record.seconds == pytest.approx(0.2 + 0.5 + 5 * cluster.signal_seconds(), abs=1e-9)


def test_exchange_overlapped_with_computation_is_not_waited_for() -> None:
    at = setting([200, 100], 0.3, epochs=1)  # a step computes longer
    after, beside, partly = (
        modes.train_in_steps(replace(at, overlap=share), "equal") for share in (0.0, 1.0, 0.1)
    )
    assert after.exchange == pytest.approx(0.3 * after.steps)
    assert beside.exchange == 0
    assert beside.seconds == pytest.approx(after.seconds - after.exchange)
    assert beside.seconds < partly.seconds < after.seconds
    assert [a for _, a in beside.accuracy] == [a for _, a in after.accuracy]


def test_simulation_is_deterministic() -> None:
    at = setting([200, 100], 0.05, epochs=2)
    for simulate in (
        delayed.simulate,
        SIMULATED["local-sgd"],
        SIMULATED["adaptive-sgd-gtopk"],
        lambda s: modes.train_in_steps(s, "balanced"),
    ):
        assert simulate(at) == simulate(at)


def test_local_sgd_averages_every_few_steps() -> None:
    at = setting([200, 100], 0.5, epochs=3)
    record = SIMULATED["local-sgd"](at)
    assert record.steps == 18
    assert record.exchange == pytest.approx(0.5 * 3)  # an epoch has 6 steps, of at most 8
    assert record.final_accuracy > 0.7
    assert all(before < after for (before, _), (after, _) in pairwise(record.accuracy))


def replicas_of(speeds: list[float], epochs: int, **changed: Any) -> Setting:
    cluster = Cluster(speeds, noise=0.03, exchange_seconds=0.05, **changed)
    return Setting(cluster, TASK, 0, epochs, 16 * len(speeds), 0.3, 0.0, 0.2, mega_batch=1437)


@pytest.mark.parametrize("speeds", [[132, 120, 110, 100], [400, 200, 100, 100]])
def test_adaptive_sgd_equalizes_updates_from_the_third_merge_on(speeds: list[float]) -> None:
    record = SIMULATED["adaptive-sgd"](replicas_of(speeds, epochs=8))
    first, *settled = record.updates[0], *record.updates[3:]
    assert max(first) > 1.2 * min(first)
    assert all(max(updates) <= 1.10 * min(updates) for updates in settled)


def test_adaptive_sgd_reaches_accuracy_before_synchronous_averaging() -> None:
    at = replicas_of([400, 200, 100, 100], epochs=5)
    reached = {
        mode: SIMULATED[mode](at).seconds_to(0.85)
        for mode in ("adaptive-sgd", "local-sgd", "crossbow")
    }
    ahead = reached.pop("adaptive-sgd")
    assert ahead is not None
    assert all(second is None or second > ahead for second in reached.values())


def test_dead_rank_loses_only_samples_since_last_merge() -> None:
    deaths = [Death(1, second=3.0)]
    for mode in ("adaptive-sgd", "adaptive-sgd-gtopk", "local-sgd"):
        record = SIMULATED[mode](replicas_of([400, 200, 100], epochs=3, deaths=deaths))
        merged = [sizes for _, sizes in record.sizes]
        assert sum(map(sum, merged)) == 3 * len(TASK.y)  # each sample is in one merge per epoch
        died = next(place for place, sizes in enumerate(merged) if sizes[1] == 0)
        assert 0 < died < len(merged)
        assert all(min(sizes) > 0 for sizes in merged[:died])
        assert all(dead == 0 < min(first, last) for first, dead, last in merged[died:])
        assert all(dead == 0 < min(first, last) for first, dead, last in record.updates[died:])
        lost = record.samples - sum(map(sum, merged))
        assert 0 < lost <= max(sizes[1] for sizes in merged[:died]) + 16
        assert record.final_accuracy > 0.6
    nobody = replicas_of([400, 200], epochs=3, deaths=[Death(0, 1.0), Death(1, 1.0)])
    with pytest.raises(ValueError, match="every rank has died"):
        SIMULATED["adaptive-sgd"](nobody)


def test_rank_dies_once_in_any_order_of_its_deaths() -> None:
    first, *others = (
        SIMULATED["local-sgd"](replicas_of([400, 200], epochs=1, deaths=deaths)).sizes
        for deaths in (
            [Death(1, 1.0)],
            [Death(1, 1.0), Death(1, 9.0)],
            [Death(1, 9.0), Death(1, 1.0)],
        )
    )
    assert others == [first, first]


def test_rank_that_dies_in_a_batch_delays_the_merge_and_adds_nothing() -> None:
    at = setting([400, 100], 0.1, epochs=1)
    without_noise = replace(at.cluster, noise=0.0, deaths=[Death(1, 6.0)])  # its batches: 1.28 s
    record = SIMULATED["local-sgd"](replace(at, cluster=without_noise))
    merged_at, sizes = record.sizes[0]
    assert merged_at == pytest.approx(6.0 + 0.1)
    assert sizes[0] > sizes[1] == 0
    assert record.seconds > SIMULATED["local-sgd"](at).seconds  # its samples are computed again
