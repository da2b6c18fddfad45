"""The paper's rule loses gradients; none of these algorithms does."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.kernels import sum_by_index
from tests.collectives.algorithms.worlds import (
    assert_nothing_is_lost,
    entries,
    merging_algorithm,
    pairs_of,
    random_picks,
    run,
)

FOUR = [[(5, 1.0)], [(7, 2.0)], [(5, 3.0)], [(9, 0.1)]]
# Round 0: ranks 0 and 1 merge 5:1.0 and 7:2.0, and keep 7:2.0; rank 0's pick is dropped.
#          Ranks 2 and 3 merge 5:3.0 and 9:0.1, and keep 5:3.0; rank 3's pick is dropped.
# Round 1: 7:2.0 and 5:3.0 are merged, 5:3.0 is kept; rank 1's pick is dropped.
# The result is 5:3.0. Index 5 is in it, but not rank 0's 1.0.


@merging_algorithm
def test_dropped_pick_returns_although_the_update_has_its_index(algorithm: str) -> None:
    picks = [entries(pairs, 10, np.float64) for pairs in FOUR]
    outcomes = run(algorithm, picks, 1)
    assert [pairs_of(update) for update, _ in outcomes] == [[(5, 3.0)]] * 4
    assert [pairs_of(returned) for _, returned in outcomes] == [
        [(5, 1.0)],
        [(7, 2.0)],
        [],
        [(9, 0.1)],
    ]
    assert_nothing_is_lost(picks, outcomes)


def test_papers_rule_loses_the_dropped_pick() -> None:
    picks = [entries(pairs, 10, np.float64) for pairs in FOUR]
    outcomes = run("gtopk-tree", picks, 1, put_back="published")
    update, returned = outcomes[0][0], [vector for _, vector in outcomes]
    assert [pairs_of(vector) for vector in returned] == [[], [(7, 2.0)], [], [(9, 0.1)]]
    lost = sum_by_index(picks).to_dense() - sum_by_index([update, *returned]).to_dense()
    assert np.flatnonzero(lost).tolist() == [5]
    assert lost[5] == 1.0
    with pytest.raises(AssertionError, match="coordinate 5 lost 1"):
        assert_nothing_is_lost(picks, outcomes)


@pytest.mark.parametrize("size", [4, 8])
def test_papers_rule_loses_random_picks(size: int, random: np.random.Generator) -> None:
    picks = random_picks(random, size, 200, 10, np.float64)
    everything = sum_by_index(picks).to_dense()
    for put_back, loses in (("owners", False), ("published", True)):
        outcomes = run("gtopk-tree", picks, 10, put_back=put_back)
        update = outcomes[0][0]
        kept = sum_by_index([update, *(returned for _, returned in outcomes)]).to_dense()
        assert (np.abs(everything - kept).sum() > 0.01 * np.abs(update.values).sum()) == loses
