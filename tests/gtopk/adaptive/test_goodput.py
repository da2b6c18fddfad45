"""The global batch is the best there is, moves for a gain only, and not for noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.goodput import (
    LEAST_GAIN,
    MOST_CHANGE,
    Seen,
    best_total,
    efficiency,
    goodput,
    next_total,
)
from gtopk.adaptive.shares import Limits
from gtopk.adaptive.speed import Cost


def limits_of(ranks: int, low: int = 0, high: int = 1 << 30) -> Callable[[int], Limits]:
    return lambda total: Limits(total, [low] * ranks, [min(high, total)] * ranks)


@st.composite
def cases(draw: Any) -> tuple[Seen, Callable[[int], Limits], range]:
    ranks = draw(st.integers(1, 3))
    costs = [Cost(draw(st.floats(0, 1)), draw(st.floats(1e-3, 1e-1))) for _ in range(ranks)]
    seen = Seen(costs, draw(st.floats(0, 5)), draw(st.floats(0, 1e4)), draw(st.integers(1, 64)))
    low, grain = draw(st.integers(0, 8)), draw(st.sampled_from([1, 4]))
    high = low + draw(st.integers(20, 200))
    first = -(-max(1, ranks * low) // grain) * grain
    return seen, limits_of(ranks, low, high), range(first, min(ranks * high, 60) + 1, grain)


@settings(deadline=None, max_examples=25)
@given(cases())
def test_no_other_batch_makes_more_progress(case: Any) -> None:
    seen, limits, totals = case
    chosen = best_total(seen, limits, totals)
    assert chosen in totals
    best = max(goodput(seen, limits(total)) for total in totals)
    assert goodput(seen, limits(chosen)) >= best * (1 - 1e-9)


@settings(deadline=None, max_examples=25)
@given(cases(), st.data())
def test_it_moves_for_a_gain_and_within_bounds(case: Any, data: Any) -> None:
    seen, limits, totals = case
    now = data.draw(st.sampled_from(totals))
    chosen = next_total(seen, limits, totals, now)
    assert chosen == now or chosen in totals
    assert now / MOST_CHANGE <= chosen <= now * MOST_CHANGE
    if chosen != now:
        assert goodput(seen, limits(chosen)) >= (1 + LEAST_GAIN) * goodput(seen, limits(now))


def test_one_slope_has_its_optimum_at_the_root() -> None:
    noise, exchange, fixed, slope = 900.0, 0.3, 0.1, 1e-3
    seen = Seen([Cost(fixed, slope)], exchange, noise, 64)
    expected = math.sqrt(noise * (fixed + exchange) / slope)
    assert best_total(seen, limits_of(1), range(1, 10_000)) == pytest.approx(expected, abs=1)


def test_without_noise_less_is_more_and_with_nothing_but_noise_more_is() -> None:
    costs, totals = [Cost(0.0, 1e-3)] * 2, range(64, 1025, 8)
    assert best_total(Seen(costs, 0.0, 0.0, 64), limits_of(2), totals) == 64
    assert best_total(Seen(costs, 0.1, math.inf, 64), limits_of(2), totals) == 1024
    assert efficiency(64, 50.0, 64) == 1.0
    assert efficiency(1024, math.inf, 64) == 1.0


def test_it_settles_in_few_decisions_and_noise_moves_nothing_then() -> None:
    random = np.random.default_rng(5)
    limits, totals, now = limits_of(4), range(64, 2049, 8), 64
    chosen = []
    for _ in range(200):
        noisy = [Cost(0.0, c * float(np.exp(0.03 * random.standard_normal()))) for c in SLOPES]
        noise = 1500 * float(np.exp(0.2 * random.standard_normal()))
        now = next_total(Seen(noisy, 0.1, noise, 64), limits, totals, now)
        chosen.append(now)
    true = Seen([Cost(0.0, c) for c in SLOPES], 0.1, 1500.0, 64)
    best = goodput(true, limits(best_total(true, limits, totals)))
    assert all(goodput(true, limits(total)) > 0.92 * best for total in chosen[5:])
    assert sum(a != b for a, b in pairwise(chosen[5:])) <= 2


SLOPES = [1 / speed for speed in (400, 200, 100, 100)]
