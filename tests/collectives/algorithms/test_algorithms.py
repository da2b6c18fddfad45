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
def test_nothing_but_rounding_is_lost_in_float32(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    assert_nothing_is_lost(picks, run(algorithm, picks, k))


@truncating_algorithm
@settings(max_examples=20)
@given(worlds(np.float32, most_ranks=9))
def test_update_has_at_most_k_entries_and_returned_entries_are_own_picks(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    for pick, (update, returned) in zip(picks, run(algorithm, picks, k), strict=True):
        assert update.entries <= k
        assert bits(returned) == bits(pick.where(contains(returned.indices, pick.indices)))


@every_algorithm
@every_size
def test_delays_of_ranks_do_not_change_the_result(
    algorithm: str, size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 10)
    world = local_world(size, timeout_seconds=30)
    for transport in world:
        _delay(transport, np.random.default_rng([size, transport.rank]))
    delayed = run_ranks(world, lambda t: reduce(picks[t.rank], 10, t, algorithm))
    for (update, returned), (delayed_update, delayed_returned) in zip(
        run(algorithm, picks, 10), delayed, strict=True
    ):
        assert bits(update) == bits(delayed_update)
        assert bits(returned) == bits(delayed_returned)


def _delay(transport: LocalTransport, random: np.random.Generator) -> None:
    """Delay a rank's sends and receives, each by a different time."""

    def delayed(call: Callable[..., object]) -> Callable[..., object]:
        def call_later(*arguments: object) -> object:
            time.sleep(random.uniform(0, 2e-3))
            return call(*arguments)

        return call_later

    transport.send, transport.receive = delayed(transport.send), delayed(transport.receive)


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
def test_update_is_the_sum_of_all_picks_without_truncation(
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
def test_two_ranks_get_the_largest_entries_of_their_sum(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, (a, *others) = world
    b = others[0] if others else a
    expected, _ = select(a.to_dense() + b.to_dense(), k)
    for update, _ in run(algorithm, [a, b], k):
        assert bits(update) == bits(expected)


@every_algorithm
def test_single_rank_gets_its_own_picks_as_update(algorithm: str) -> None:
    pick = entries([(1, 2.0), (3, -1.0)], 5, np.float32)
    ((update, returned),) = run(algorithm, [pick], 3)
    assert pairs_of(update) == pairs_of(pick)
    assert returned.entries == 0


@pytest.mark.parametrize(("size", "mask"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 5)])
def test_swapping_partner_ranks_does_not_change_the_result(
    size: int, mask: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 10)
    swapped = [picks[rank ^ mask] for rank in range(size)]
    outcomes, after_swap = run("gtopk", picks, 10), run("gtopk", swapped, 10)
    for rank in range(size):
        for one, other in zip(outcomes[rank], after_swap[rank ^ mask], strict=True):
            assert bits(one) == bits(other)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tree_and_recursive_doubling_agree_at_powers_of_two(
    size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 10)
    assert bits(run("gtopk", picks, 10)[0][0]) == bits(run("gtopk-tree", picks, 10)[0][0])


@every_algorithm
@every_size
def test_reduce_does_not_change_its_arguments(
    algorithm: str, size: int, random: np.random.Generator
) -> None:
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
def test_update_is_empty_when_no_rank_picks_entries(algorithm: str, size: int) -> None:
    for update, returned in run(algorithm, [SparseVector.empty(7)] * size, 3):
        assert (update.entries, returned.entries) == (0, 0)
        assert update.length == returned.length == 7


@every_algorithm
@every_size
def test_update_is_the_picks_of_the_only_rank_with_entries(algorithm: str, size: int) -> None:
    for owner in range(size):
        picks = [SparseVector.empty(7)] * size
        picks[owner] = entries([(2, -1.5), (6, 3.0)], 7, np.float32)
        for update, returned in run(algorithm, picks, 7):
            assert pairs_of(update) == [(2, -1.5), (6, 3.0)]
            assert returned.entries == 0


@every_algorithm
@every_size
def test_vector_of_one_element_is_summed(algorithm: str, size: int) -> None:
    picks = [entries([(0, 1.0 + rank)], 1, np.float32) for rank in range(size)]
    for update, returned in run(algorithm, picks, 1):
        assert pairs_of(update) == [(0, size * (size + 1) / 2)]
        assert returned.entries == 0


@truncating_algorithm
@every_size
def test_largest_pick_wins_when_each_rank_picks_one_entry(algorithm: str, size: int) -> None:
    picks = [entries([(rank, -1.0 - rank)], size, np.float32) for rank in range(size)]
    outcomes = run(algorithm, picks, 1)
    for rank, (update, returned) in enumerate(outcomes):
        assert pairs_of(update) == [(size - 1, -float(size))]
        assert pairs_of(returned) == ([] if rank == size - 1 else pairs_of(picks[rank]))


@truncating_algorithm
@every_size
def test_lowest_indices_win_among_equal_values(algorithm: str, size: int) -> None:
    picks = [entries([(size - 1 - rank, 1.0)], size, np.float32) for rank in range(size)]
    for update, _ in run(algorithm, picks, 2 if size > 1 else 1):
        assert update.indices.tolist() == list(range(min(size, 2)))


@truncating_algorithm
def test_picks_that_cancel_leave_room_for_others_and_are_returned(algorithm: str) -> None:
    # Index 3 has the largest picks, which sum to zero.
    a = entries([(3, 9.0), (4, 0.5)], 8, np.float32)
    b = entries([(3, -9.0), (7, 0.25)], 8, np.float32)
    (update, first), (_, second) = run(algorithm, [a, b], 2)
    assert pairs_of(update) == [(4, 0.5), (7, 0.25)]
    assert pairs_of(first) == [(3, 9.0)]
    assert pairs_of(second) == [(3, -9.0)]
