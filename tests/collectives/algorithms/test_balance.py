"""Balancing cuts the update into equal blocks, in index order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.algorithms.oktopk import block_slices, is_even


def test_balancing_moves_are_as_drawn() -> None:
    # Region 0 keeps 0 1 and sends 2 3 4 and 5; region 2 keeps 6 7.
    assert [[range(9)[part] for part in row] for row in block_slices([6, 0, 2])] == [
        [range(2), range(2, 5), range(5, 6)],
        [range(0), range(0), range(0)],
        [range(0), range(0), range(2)],
    ]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_every_entry_goes_to_one_block_and_block_sizes_differ_by_at_most_one(
    counts: list[int],
) -> None:
    plan = block_slices(counts)
    blocks: list[list[tuple[int, int]]] = [[] for _ in counts]
    for region, row in enumerate(plan):
        for block, part in enumerate(row):
            blocks[block] += [(region, position) for position in range(100)[part]]
    in_order = [(region, at) for region, count in enumerate(counts) for at in range(count)]
    assert [entry for block in blocks for entry in block] == in_order
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_rank_with_a_surplus_sends_at_most_all_but_its_block(counts: list[int]) -> None:
    block = -(-sum(counts) // len(counts))
    for region, row in enumerate(block_slices(counts)):
        sent = sum(part.stop - part.start for at, part in enumerate(row) if at != region)
        assert sent <= sum(counts) - block + 1


@pytest.mark.parametrize(
    ("counts", "even"),
    [
        ([0, 0], True),
        ([7], True),
        ([5, 5, 5, 5], True),
        ([6, 5, 5, 4], True),
        ([7, 5, 4, 4], False),
        ([1, 0, 0], True),  # nothing to divide
        ([2, 0, 0], False),
    ],
)
def test_counts_are_even_within_a_quarter_of_their_mean(counts: list[int], even: bool) -> None:
    assert is_even(counts) == even
