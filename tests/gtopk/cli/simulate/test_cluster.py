"""A cluster's seconds follow from its parameters."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.cost import Link
from collectives.cost_model import Candidate
from gtopk.cli.simulate.setting import Cluster, Slowdown


def test_batch_time_is_overhead_plus_samples_over_speed(random: np.random.Generator) -> None:
    cluster = Cluster([400, 100], overhead_seconds=0.01)
    assert cluster.compute_seconds(0, 40, 0.0, random) == pytest.approx(0.11)
    assert cluster.compute_seconds(1, 40, 0.0, random) == pytest.approx(0.41)
    assert cluster.compute_seconds(1, 0, 0.0, random) == 0.0


def test_slowdown_begins_at_its_second_on_its_rank(random: np.random.Generator) -> None:
    cluster = Cluster([100, 100], slowdowns=[Slowdown(1, 4.0, second=5.0)])
    seconds = [
        cluster.compute_seconds(rank, 100, at, random) for rank in range(2) for at in (4.9, 5.0)
    ]
    assert seconds == pytest.approx([1.0, 1.0, 1.0, 4.0])


def test_noise_is_lognormal_and_repeats_with_its_seed() -> None:
    cluster = Cluster([100, 100], noise=0.1)

    def draw(seed: int) -> list[float]:
        return [
            cluster.compute_seconds(rank, 100, 0.0, random)
            for rank, random in enumerate(cluster.noises(seed))
            for _ in range(500)
        ]

    assert draw(1) == draw(1) != draw(2)
    logarithms = np.log(draw(1))
    assert abs(logarithms.mean()) < 0.02
    assert logarithms.std() == pytest.approx(0.1, rel=0.1)


def test_exchange_time_comes_from_the_schedule_unless_given() -> None:
    slow, fast = (Cluster([1] * 4, link=Link.of(bits, 0.0)) for bits in (1e8, 1e9))
    dense = Candidate("dense")
    assert slow.reduce_seconds(dense, 10**6) == pytest.approx(
        10 * fast.reduce_seconds(dense, 10**6)
    )
    assert slow.reduce_seconds(dense, 10**6) == pytest.approx(2 * 3 / 4 * 4e6 * 8 / 1e8)
    assert Cluster([1] * 4, exchange_seconds=0.3).reduce_seconds(dense, 10**6) == 0.3
