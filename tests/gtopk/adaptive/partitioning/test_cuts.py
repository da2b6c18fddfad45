"""Every sample comes once per epoch for any sizes, and resuming changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.partitioning.cuts import Plan, cut_epoch, shuffled


@st.composite
def plans(draw: Any) -> tuple[Plan, int]:
    ranks = draw(st.integers(1, 8))
    sizes = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any)
    plan = Plan(draw(sizes))
    for step in sorted(draw(st.sets(st.integers(1, 30), max_size=5))):
        plan.change(step, draw(sizes))
    return plan, ranks


@settings(deadline=None)
@given(plans(), st.integers(0, 200))
def test_every_place_is_in_exactly_one_share(case: Any, length: int) -> None:
    plan, ranks = case
    cuts = list(cut_epoch(plan, 0, 0, length))
    places = [place for cut in cuts for rank in range(ranks) for place in cut.share(rank)]
    assert places == list(range(length))
    assert all(cut.sizes == plan.at(cut.step) for cut in cuts[:-1])


@settings(deadline=None)
@given(plans(), st.integers(0, 200))
def test_rank_without_samples_gets_two_placeholder_samples_of_the_step(
    case: Any, length: int
) -> None:
    plan, _ = case
    for cut in cut_epoch(plan, 0, 0, length):
        places = range(cut.start, cut.start + cut.total)
        for rank, size in enumerate(cut.sizes):
            placeholder = [places[0], places[-1] if cut.total < 2 else places[1]]
            assert list(cut.batch(rank)) == (list(cut.share(rank)) if size else placeholder)


@settings(deadline=None)
@given(plans(), st.integers(0, 200))
def test_drop_last_drops_only_the_partial_step(case: Any, length: int) -> None:
    plan, _ = case
    kept = list(cut_epoch(plan, 0, 0, length, drop_last=True))
    assert all(cut.sizes == plan.at(cut.step) for cut in kept)
    end = sum(cut.total for cut in kept)
    assert length - end < sum(plan.at(len(kept)))


@settings(deadline=None)
@given(plans(), st.integers(0, 200), st.integers(0, 20))
def test_plan_resumes_epoch_where_it_stopped(case: Any, length: int, left_after: int) -> None:
    plan, ranks = case
    cuts = list(cut_epoch(plan, 0, 0, length))
    head, tail = cuts[:left_after], cuts[left_after:]
    if not tail:
        return
    other = Plan([1] * ranks)
    other.load_state_dict(plan.state_dict(len(head)), len(head))
    assert list(cut_epoch(other, len(head), tail[0].start, length)) == tail


def test_plan_changes_only_steps_not_yet_cut() -> None:
    plan = Plan([2, 2])
    cuts = cut_epoch(plan, 0, 0, 40)
    next(cuts), next(cuts)
    with pytest.raises(ValueError, match="step 1 has been cut already"):
        plan.change(1, [3, 1])
    plan.change(2, [3, 1])
    plan.change(2, [1, 3])
    assert next(cuts).sizes == (1, 3)


def test_shuffled_order_is_a_permutation_set_by_seed_and_epoch() -> None:
    orders = [shuffled(50, seed=3, epoch=epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1]
    assert orders[1] == shuffled(50, seed=3, epoch=1)
