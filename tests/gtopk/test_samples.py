"""Weights follow from the ranks' numbers of samples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.samples import MOST, VOTE_BITS, Samples


@settings(deadline=None)
@given(st.lists(st.integers(0, MOST), min_size=1, max_size=20), st.integers(0, 2**VOTE_BITS - 1))
def test_weights_are_shares_of_the_total(counts: list[int], rest_of_vote: int) -> None:
    ranks = [Samples(count) for count in counts]
    votes = [rank.vote | rest_of_vote for rank in ranks]
    assert max(votes) < 2**63
    weights = [rank.weight(votes) for rank in ranks]
    assert weights == [count / sum(counts) if count else 0.0 for count in counts]


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(1, 9))
def test_weights_do_not_hang_on_the_size_of_the_step(counts: list[int], factor: int) -> None:
    small, large = ([Samples(n * each) for each in counts] for n in (1, factor))
    for one, other in zip(small, large, strict=True):
        weight = other.weight([rank.vote for rank in large])
        assert weight == pytest.approx(one.weight([rank.vote for rank in small]))


def test_a_sums_gradient_weighs_one_over_the_total() -> None:
    ranks = [Samples(count, summed=True) for count in (3, 0, 5)]
    votes = [rank.vote for rank in ranks]
    assert [rank.weight(votes) for rank in ranks] == [1 / 8, 0.0, 1 / 8]


def test_ranks_that_say_different_things_have_different_facts() -> None:
    assert len({Samples(None).facts, Samples(3).facts, Samples(3, summed=True).facts}) == 3
    assert Samples(3).facts == Samples(4).facts


@pytest.mark.parametrize("count", [-1, MOST + 1])
def test_a_number_that_does_not_fit_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match="must lie in 0"):
        Samples(count)
