"""The global batch is optimal, and changes only for a real gain, not for noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.adaptive.partitioning.cuts import Limits
from gtopk.adaptive.throughput import (
    LEAST_GAIN,
    MOST_CHANGE,
    Cost,
    Measurements,
    best_total,
    efficiency,
    goodput,
    next_total,
)
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import (
    FEATURES,
    Modelled,
    data,
    mean_loss,
    network,
    on_ranks,
    sgd,
    some_optimizer,
    step_on,
)


def limits_of(ranks: int, low: int = 0, high: int = 1 << 30) -> Callable[[int], Limits]:
    return lambda total: Limits(total, [low] * ranks, [min(high, total)] * ranks)


@st.composite
def cases(draw: Any) -> tuple[Measurements, Callable[[int], Limits], range]:
    ranks = draw(st.integers(1, 3))
    costs = [Cost(draw(st.floats(0, 1)), draw(st.floats(1e-3, 1e-1))) for _ in range(ranks)]
    seen = Measurements(
        costs, draw(st.floats(0, 5)), draw(st.floats(0, 1e4)), draw(st.integers(1, 64))
    )
    low, grain = draw(st.integers(0, 8)), draw(st.sampled_from([1, 4]))
    high = low + draw(st.integers(20, 200))
    first = -(-max(1, ranks * low) // grain) * grain
    return seen, limits_of(ranks, low, high), range(first, min(ranks * high, 60) + 1, grain)


@settings(deadline=None, max_examples=25)
@given(cases())
def test_best_total_maximizes_goodput(case: Any) -> None:
    seen, limits, totals = case
    chosen = best_total(seen, limits, totals)
    assert chosen in totals
    best = max(goodput(seen, limits(total)) for total in totals)
    assert goodput(seen, limits(chosen)) >= best * (1 - 1e-9)


@settings(deadline=None, max_examples=25)
@given(cases(), st.data())
def test_next_total_moves_only_for_a_gain_and_within_bounds(case: Any, data: Any) -> None:
    seen, limits, totals = case
    now = data.draw(st.sampled_from(totals))
    chosen = next_total(seen, limits, totals, now)
    assert chosen == now or chosen in totals
    assert now / MOST_CHANGE <= chosen <= now * MOST_CHANGE
    if chosen != now:
        assert goodput(seen, limits(chosen)) >= (1 + LEAST_GAIN) * goodput(seen, limits(now))


def test_best_total_for_one_rank_matches_closed_form() -> None:
    noise, exchange, fixed, slope = 900.0, 0.3, 0.1, 1e-3
    seen = Measurements([Cost(fixed, slope)], exchange, noise, 64)
    expected = math.sqrt(noise * (fixed + exchange) / slope)
    assert best_total(seen, limits_of(1), range(1, 10_000)) == pytest.approx(expected, abs=1)


def test_best_total_is_smallest_without_noise_and_largest_with_only_noise() -> None:
    costs, totals = [Cost(0.0, 1e-3)] * 2, range(64, 1025, 8)
    assert best_total(Measurements(costs, 0.0, 0.0, 64), limits_of(2), totals) == 64
    assert best_total(Measurements(costs, 0.1, math.inf, 64), limits_of(2), totals) == 1024
    assert efficiency(64, 50.0, 64) == 1.0
    assert efficiency(1024, math.inf, 64) == 1.0


def test_next_total_settles_quickly_and_ignores_measurement_noise() -> None:
    random = np.random.default_rng(5)
    limits, totals, now = limits_of(4), range(64, 2049, 8), 64
    chosen = []
    for _ in range(200):
        noisy = [Cost(0.0, c * float(np.exp(0.03 * random.standard_normal()))) for c in SLOPES]
        noise = 1500 * float(np.exp(0.2 * random.standard_normal()))
        now = next_total(Measurements(noisy, 0.1, noise, 64), limits, totals, now)
        chosen.append(now)
    true = Measurements([Cost(0.0, c) for c in SLOPES], 0.1, 1500.0, 64)
    best = goodput(true, limits(best_total(true, limits, totals)))
    assert all(goodput(true, limits(total)) > 0.92 * best for total in chosen[5:])
    assert sum(a != b for a, b in pairwise(chosen[5:])) <= 2


SLOPES = [1 / speed for speed in (400, 200, 100, 100)]


class ModelledExchange(Modelled):
    """A timer with long exchanges, and waiting for other ranks."""

    def exchanged(self, step: Any) -> float:
        return 20.0 + 1 / self.speed


def test_global_batch_grows_to_maximize_goodput() -> None:
    def program(here: World, resumed: Any = None) -> Any:
        model = network()
        optimizer = sgd(model, hvd.Compression.gtopk(density=0.2))
        # So much noise that every sample counts fully, and exchanges that larger batches hide.
        loader = hvd.adapt(
            DataLoader(TensorDataset(torch.arange(900), *noisy.tensors), 4, shuffle=True),
            optimizer,
            policy="goodput",
            max_global_batch=50,
            max_batch=30 if here.rank == 0 else None,
            lr_scaling="sqrt",
            noise_every=1,
            interval=3,
            min_batch=1,
            timer=ModelledExchange(10.0 + 10 * here.rank),
        )
        if resumed is not None:
            loader.load_state_dict(resumed)
        seen, totals = [], []
        for indices, *batch in loader:
            seen += indices.tolist() if loader.num_samples else []
            totals.append(sum(loader.sizes))
            step_on(model, optimizer, batch, mean_loss)
        return seen, totals, loader.sizes, loader.state_dict()

    x = torch.randn(900, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = torch.randn(900, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    noisy = TensorDataset(x, 30 * y)
    results = on_ranks(2, program)
    assert sorted(i for seen, *_ in results for i in seen) == list(range(900))
    totals, sizes = results[0][1:3]
    assert results[1][1:3] == (totals, sizes)
    assert totals[0] == 8
    assert sum(sizes) == 50
    assert all(b <= 2 * a for a, b in pairwise(totals[:-1]))
    assert sizes[0] < sizes[1] <= 2 * sizes[0] + 1
    saved = [json.loads(json.dumps(state)) for *_, state in results]
    (_, totals, *_), _ = on_ranks(2, lambda here: program(here, saved[here.rank]))
    assert totals[0] == 50


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"policy": "goodput", "lr_scaling": "sqrt"}, "needs min_global_batch <="),
        ({"policy": "goodput", "max_global_batch": 99}, "learning rate has to follow"),
        ({"max_global_batch": 99}, "need policy='goodput'"),
    ],
)
def test_incomplete_goodput_options_raise(options: dict[str, Any], wrong: str) -> None:
    def program(here: World) -> None:
        with pytest.raises(ValueError, match=wrong):
            hvd.adapt(DataLoader(data(80), 8), some_optimizer(), **options)

    on_ranks(1, program)
