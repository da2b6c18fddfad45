"""The weights of a merge sum to one with every weighting."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.model_averaging.weights import (
    WEIGHTS,
    Report,
    perturb_weights,
    published_weights,
    sample_weights,
)

reports = st.lists(
    st.builds(
        Report,
        size=st.integers(1, 1024),
        updates=st.integers(0, 100),
        samples=st.integers(0, 10**6),
        norm=st.floats(0, 0.2),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(reports, st.sampled_from(sorted(WEIGHTS)), st.floats(0, 0.9))
def test_weights_sum_to_one_and_leave_nobody_out(
    said: list[Report], rule: str, perturbation: float
) -> None:
    weights = perturb_weights(WEIGHTS[rule](said), said, perturbation)
    assert math.fsum(weights) == pytest.approx(1.0, abs=1e-12)
    assert min(weights) > 0


def test_the_perturbation_leans_to_the_most_updates_while_norms_are_small() -> None:
    said = [Report(8, updates, 80, norm=0.01) for updates in (3, 5, 4)]
    weights = [0.2, 0.5, 0.3]
    leaning = perturb_weights(weights, said, 0.1)
    total = 0.2 * 0.9 + 0.5 * 1.1 + 0.3
    assert leaning == pytest.approx([0.18 / total, 0.55 / total, 0.3 / total])
    assert perturb_weights(weights, [*said[:2], said[2]._replace(norm=0.2)], 0.1) == weights
    assert perturb_weights(weights, [report._replace(updates=4) for report in said], 0.1) == weights


def test_published_weights_are_sizes_where_updates_are_equal() -> None:
    assert published_weights([Report(30, 5, 9), Report(10, 5, 9)]) == [0.75, 0.25]
    assert published_weights([Report(30, 6, 9), Report(10, 2, 9)]) == [0.75, 0.25]


def test_a_rank_without_samples_counts_as_if_it_had_a_batch() -> None:
    assert sample_weights([Report(10, 3, 30), Report(10, 0, 0)]) == [0.75, 0.25]
