"""The promises of every algorithm, with default options and in edge cases."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from collectives import SparseVector, reduce, run_ranks, select
from collectives.kernels import contains, sum_by_index
from collectives.transports import LocalTransport, local_world
from tests.collectives.algorithms.worlds import (
    assert_nothing_is_lost,
    bits,
    entries,
    every_algorithm,
    every_size,
    integer_picks,
    pairs_of,
    random_picks,
    run,
    truncating_algorithm,
    worlds,
)


@every_algorithm
@settings(max_examples=20)
@given(worlds(np.float64, most_ranks=9))
def test_nothing_is_lost(algorithm: str, world: tuple[int, list[SparseVector]]) -> None:
    k, picks = world
    assert_nothing_is_lost(picks, run(algorithm, picks, k))


@every_algorithm
@settings(max_examples=20)
@given(worlds(np.float32, most_ranks=9))
def test_nothing_is_lost_in_float32_but_the_rounding_of_its_additions(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    assert_nothing_is_lost(picks, run(algorithm, picks, k))


@truncating_algorithm
@settings(max_examples=20)
@given(worlds(np.float32, most_ranks=9))
def test_the_update_has_at_most_k_entries_and_what_returns_was_picked(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    for pick, (update, returned) in zip(picks, run(algorithm, picks, k), strict=True):
        assert update.entries <= k
        assert bits(returned) == bits(pick.where(contains(returned.indices, pick.indices)))


@every_algorithm
@every_size
def test_a_late_rank_does_not_change_the_result(
    algorithm: str, size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 10)
    world = local_world(size, timeout_seconds=30)
    for transport in world:
        _make_late(transport, np.random.default_rng([size, transport.rank]))
    late = run_ranks(world, lambda t: reduce(picks[t.rank], 10, t, algorithm))
    for (update, returned), (late_update, late_returned) in zip(
        run(algorithm, picks, 10), late, strict=True
    ):
        assert bits(update) == bits(late_update)
        assert bits(returned) == bits(late_returned)


def _make_late(transport: LocalTransport, random: np.random.Generator) -> None:
    """Delay a rank's sends and receives, each by a different time."""

    def late(call: Callable[..., object]) -> Callable[..., object]:
        def dawdle(*arguments: object) -> object:
            time.sleep(random.uniform(0, 2e-3))
            return call(*arguments)

        return dawdle

    transport.send, transport.receive = late(transport.send), late(transport.receive)


@every_algorithm
@every_size
def test_keeping_everything_is_the_dense_sum(
    algorithm: str, size: int, random: np.random.Generator
) -> None:
    length = 40
    picks = integer_picks(random, size, length, length)
    expected = sum(pick.to_dense() for pick in picks)
    outcomes = run(algorithm, picks, length)
    for update, _ in outcomes:
        assert update.to_dense().tolist() == expected.tolist()
    # Only picks that cancelled in a merge are returned.
    assert not sum(returned.to_dense() for _, returned in outcomes).any()


@pytest.mark.parametrize("algorithm", ["dense", "topk-allgather"])
@every_size
def test_without_truncation_the_update_is_the_sum_of_all_picks(
    algorithm: str, size: int, random: np.random.Generator
) -> None:
    picks = integer_picks(random, size, 200, 10)
    expected = sum(pick.to_dense() for pick in picks)
    for update, returned in run(algorithm, picks, 10):
        assert update.to_dense().tolist() == expected.tolist()
        assert returned.entries == 0


@every_size
def test_topk_allgather_adds_in_rank_order(size: int, random: np.random.Generator) -> None:
    picks = random_picks(random, size, 200, 10)
    expected = sum_by_index(picks)
    assert all(bits(update) == bits(expected) for update, _ in run("topk-allgather", picks, 10))


@truncating_algorithm
@settings(max_examples=20)
@given(worlds(np.float32))
def test_two_ranks_get_the_largest_of_the_sum(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, (a, *others) = world
    b = others[0] if others else a
    expected, _ = select(a.to_dense() + b.to_dense(), k)
    for update, _ in run(algorithm, [a, b], k):
        assert bits(update) == bits(expected)


@every_algorithm
def test_a_single_rank_gets_back_what_it_picked(algorithm: str) -> None:
    pick = entries([(1, 2.0), (3, -1.0)], 5, np.float32)
    ((update, returned),) = run(algorithm, [pick], 3)
    assert pairs_of(update) == pairs_of(pick)
    assert returned.entries == 0


@pytest.mark.parametrize(("size", "mask"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 5)])
def test_partners_may_trade_places(size: int, mask: int, random: np.random.Generator) -> None:
    picks = random_picks(random, size, 200, 10)
    traded = [picks[rank ^ mask] for rank in range(size)]
    outcomes, after_trade = run("gtopk", picks, 10), run("gtopk", traded, 10)
    for rank in range(size):
        for one, other in zip(outcomes[rank], after_trade[rank ^ mask], strict=True):
            assert bits(one) == bits(other)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tree_and_recursive_doubling_merge_alike_at_powers_of_two(
    size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 10)
    assert bits(run("gtopk", picks, 10)[0][0]) == bits(run("gtopk-tree", picks, 10)[0][0])


@every_algorithm
@every_size
def test_no_argument_changes(algorithm: str, size: int, random: np.random.Generator) -> None:
    picks = random_picks(random, size, 50, 5)
    before = [bits(pick) for pick in picks]
    for pick in picks:
        pick.indices.setflags(write=False)
        pick.values.setflags(write=False)
    run(algorithm, picks, 5)
    assert [bits(pick) for pick in picks] == before


# ---- the edges


@every_algorithm
@every_size
def test_nobody_picks_anything(algorithm: str, size: int) -> None:
    for update, returned in run(algorithm, [SparseVector.empty(7)] * size, 3):
        assert (update.entries, returned.entries) == (0, 0)
        assert update.length == returned.length == 7


@every_algorithm
@every_size
def test_one_rank_alone_picks_something(algorithm: str, size: int) -> None:
    for owner in range(size):
        picks = [SparseVector.empty(7)] * size
        picks[owner] = entries([(2, -1.5), (6, 3.0)], 7, np.float32)
        for update, returned in run(algorithm, picks, 7):
            assert pairs_of(update) == [(2, -1.5), (6, 3.0)]
            assert returned.entries == 0


@every_algorithm
@every_size
def test_a_vector_of_one_element_is_summed(algorithm: str, size: int) -> None:
    picks = [entries([(0, 1.0 + rank)], 1, np.float32) for rank in range(size)]
    for update, returned in run(algorithm, picks, 1):
        assert pairs_of(update) == [(0, size * (size + 1) / 2)]
        assert returned.entries == 0


@truncating_algorithm
@every_size
def test_with_one_entry_each_the_largest_wins(algorithm: str, size: int) -> None:
    picks = [entries([(rank, -1.0 - rank)], size, np.float32) for rank in range(size)]
    outcomes = run(algorithm, picks, 1)
    for rank, (update, returned) in enumerate(outcomes):
        assert pairs_of(update) == [(size - 1, -float(size))]
        assert pairs_of(returned) == ([] if rank == size - 1 else pairs_of(picks[rank]))


@truncating_algorithm
@every_size
def test_among_equals_the_lowest_indices_win(algorithm: str, size: int) -> None:
    picks = [entries([(size - 1 - rank, 1.0)], size, np.float32) for rank in range(size)]
    for update, _ in run(algorithm, picks, 2 if size > 1 else 1):
        assert update.indices.tolist() == list(range(min(size, 2)))


@truncating_algorithm
def test_entries_that_cancel_leave_room_for_others(algorithm: str) -> None:
    # Index 3 has the largest picks, which sum to zero.
    a = entries([(3, 9.0), (4, 0.5)], 8, np.float32)
    b = entries([(3, -9.0), (7, 0.25)], 8, np.float32)
    (update, first), (_, second) = run(algorithm, [a, b], 2)
    assert pairs_of(update) == [(4, 0.5), (7, 0.25)]
    assert pairs_of(first) == [(3, 9.0)]
    assert pairs_of(second) == [(3, -9.0)]
