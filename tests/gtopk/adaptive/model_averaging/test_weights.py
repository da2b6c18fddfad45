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
def test_merge_weights_sum_to_one_and_are_positive(
    merge_reports: list[Report], rule: str, perturbation: float
) -> None:
    weights = perturb_weights(WEIGHTS[rule](merge_reports), merge_reports, perturbation)
    assert math.fsum(weights) == pytest.approx(1.0, abs=1e-12)
    assert min(weights) > 0


def test_perturbation_favors_rank_with_most_updates_if_norms_are_small() -> None:
    merge_reports = [Report(8, updates, 80, norm=0.01) for updates in (3, 5, 4)]
    weights = [0.2, 0.5, 0.3]
    perturbed = perturb_weights(weights, merge_reports, 0.1)
    total = 0.2 * 0.9 + 0.5 * 1.1 + 0.3
    assert perturbed == pytest.approx([0.18 / total, 0.55 / total, 0.3 / total])
    assert (
        perturb_weights(weights, [*merge_reports[:2], merge_reports[2]._replace(norm=0.2)], 0.1)
        == weights
    )
    assert (
        perturb_weights(weights, [report._replace(updates=4) for report in merge_reports], 0.1)
        == weights
    )


def test_published_weights_follow_sizes_if_updates_are_equal_else_updates() -> None:
    assert published_weights([Report(30, 5, 9), Report(10, 5, 9)]) == [0.75, 0.25]
    assert published_weights([Report(30, 6, 9), Report(10, 2, 9)]) == [0.75, 0.25]


def test_rank_without_samples_weighs_as_one_batch() -> None:
    assert sample_weights([Report(10, 3, 30), Report(10, 0, 0)]) == [0.75, 0.25]
