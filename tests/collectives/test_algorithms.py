"""What every algorithm promises at its usual options; the pictures; and bugs of others, retold."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from collectives import ALGORITHMS, MessageError, SparseVector, reduce, run_ranks, select
from collectives.algorithms import gtopk, gtopk_tree
from collectives.kernels import contains, sum_by_index
from collectives.transports import LocalTransport, Traffic, local_world
from collectives.wire import HEADER_BYTES, encode
from tests.collectives.algorithms.worlds import (
    assert_nothing_is_lost,
    bits,
    entries,
    integer_picks,
    pairs_of,
    random_picks,
    run,
    worlds,
)

TRUNCATING = ["gtopk-tree", "gtopk", "oktopk"]  # whose update has at most k entries
MERGING = ["gtopk-tree", "gtopk"]  # and which drop picks on the way
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
truncating_algorithm = pytest.mark.parametrize("algorithm", TRUNCATING)
merging_algorithm = pytest.mark.parametrize("algorithm", MERGING)
every_size = pytest.mark.parametrize("size", range(1, 10))


# ---- the laws


@every_algorithm
@settings(max_examples=60)
@given(worlds(np.float64, most_ranks=9))
def test_nothing_is_lost(algorithm: str, world: tuple[int, list[SparseVector]]) -> None:
    k, picks = world
    assert_nothing_is_lost(picks, run(algorithm, picks, k))


@every_algorithm
@settings(max_examples=60)
@given(worlds(np.float32, most_ranks=9))
def test_nothing_is_lost_in_float32_but_the_rounding_of_its_additions(
    algorithm: str, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    assert_nothing_is_lost(picks, run(algorithm, picks, k))


@truncating_algorithm
@settings(max_examples=60)
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
def test_who_is_late_does_not_matter(
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
    """Let a rank dawdle, for another time each time, before it sends or receives."""

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
    # What returns had cancelled out in a merge.
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
@settings(max_examples=60)
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
def test_of_one_entry_each_the_largest_wins(algorithm: str, size: int) -> None:
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
def test_what_cancels_leaves_room_for_others(algorithm: str) -> None:
    # Index 3 has the largest picks, and their sum is nothing.
    a = entries([(3, 9.0), (4, 0.5)], 8, np.float32)
    b = entries([(3, -9.0), (7, 0.25)], 8, np.float32)
    (update, first), (_, second) = run(algorithm, [a, b], 2)
    assert pairs_of(update) == [(4, 0.5), (7, 0.25)]
    assert pairs_of(first) == [(3, 9.0)]
    assert pairs_of(second) == [(3, -9.0)]


# ---- the paper's loss


def by_the_papers_rule(picks: Sequence[SparseVector], update: SparseVector) -> list[SparseVector]:
    """Return what returns when every pick is cleared whose index is in the final result."""
    return [pick.where(~contains(update.indices, pick.indices)) for pick in picks]


FOUR = [[(5, 1.0)], [(7, 2.0)], [(5, 3.0)], [(9, 0.1)]]
# Round 0: ranks 0 and 1 merge 5:1.0 and 7:2.0, and keep 7:2.0; rank 0's pick is dropped.
#          Ranks 2 and 3 merge 5:3.0 and 9:0.1, and keep 5:3.0; rank 3's pick is dropped.
# Round 1: 7:2.0 and 5:3.0 are merged, 5:3.0 is kept; rank 1's pick is dropped.
# The result is 5:3.0. Index 5 is in it, but not rank 0's 1.0.


@merging_algorithm
def test_a_pick_dropped_on_the_way_returns_though_its_index_came_back(algorithm: str) -> None:
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


def test_the_papers_rule_loses_that_pick() -> None:
    picks = [entries(pairs, 10, np.float64) for pairs in FOUR]
    update = run("gtopk-tree", picks, 1)[0][0]
    returned = by_the_papers_rule(picks, update)
    assert [pairs_of(vector) for vector in returned] == [[], [(7, 2.0)], [], [(9, 0.1)]]
    lost = sum_by_index(picks).to_dense() - sum_by_index([update, *returned]).to_dense()
    assert np.flatnonzero(lost).tolist() == [5]
    assert lost[5] == 1.0
    with pytest.raises(AssertionError, match="coordinate 5 lost 1"):
        assert_nothing_is_lost(picks, [(update, vector) for vector in returned])


@pytest.mark.parametrize("size", [4, 8])
def test_the_papers_rule_loses_from_random_picks_too(
    size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 10, np.float64)
    outcomes = run("gtopk", picks, 10)
    update = outcomes[0][0]
    everything = sum_by_index(picks).to_dense()
    for returned, loses in (
        ([returned for _, returned in outcomes], False),
        (by_the_papers_rule(picks, update), True),
    ):
        kept = sum_by_index([update, *returned]).to_dense()
        assert (np.abs(everything - kept).sum() > 0.01 * np.abs(update.values).sum()) == loses


# ---- the pictures, and what they cost


def pictured(module: object, arrow: str) -> tuple[list[list[tuple[int, int]]], list[str]]:
    """Return the messages of each "round" column of a docstring's picture, and its lines."""
    lines = module.__doc__.splitlines()
    top = next(number for number, line in enumerate(lines) if "round 0" in line)
    picture = lines[top : lines.index("", top)]
    columns = [match.start() for match in re.finditer(r"round \d", picture[0])]
    rounds: list[list[tuple[int, int]]] = [[] for _ in columns]
    for line in picture[1:]:
        for match in re.finditer(rf"(\d) {arrow} (\d)", line):
            if match.start() in columns:
                rounds[columns.index(match.start())].append((int(match[1]), int(match[2])))
    return rounds, picture


def seen_by(rank: int, rounds: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[str, int]]:
    """Return what a rank does in the pictured rounds: first it sends, then it receives."""
    events = []
    for messages in rounds:
        events += [("to", to) for source, to in messages if source == rank]
        events += [("from", source) for source, to in messages if to == rank]
    return events


def test_recursive_doubling_is_as_drawn(witness, random: np.random.Generator) -> None:
    pairs, picture = pictured(gtopk, "<->")
    swaps = [[*column, *((b, a) for a, b in column)] for column in pairs]
    assert [len(column) for column in swaps] == [4, 4]
    picks = random_picks(random, 6, 100, 5)

    four = witness(4)
    run_ranks(four.world, lambda t: gtopk.reduce(picks[t.rank], 5, t))
    for rank in range(4):
        assert four.schedule(rank) == seen_by(rank, swaps)

    # "P = 6: ranks 4 and 5 hand their picks to 0 and 1 first, and get the result back last"
    assert "P = 6: ranks 4 and 5 hand their picks to 0 and 1 first" in picture[0]
    assert "and get the result back last" in picture[1]
    folded = [[(4, 0), (5, 1)], *swaps, [(0, 4), (1, 5)]]
    six = witness(6)
    run_ranks(six.world, lambda t: gtopk.reduce(picks[t.rank], 5, t))
    for rank in range(6):
        assert six.schedule(rank) == seen_by(rank, folded)


def test_the_tree_is_as_drawn(witness, random: np.random.Generator) -> None:
    up, picture = pictured(gtopk_tree, "->")
    assert [len(column) for column in up] == [3, 1, 1]
    down_column = picture[0].index("then down")
    down = [
        [(int(a), int(b)) for a, b in re.findall(r"(\d) -> (\d)", line[down_column:])]
        for line in picture[1:]
    ]
    # "in reverse"
    assert [sorted(line) for line in down] == [
        sorted((b, a) for a, b in column) for column in reversed(up)
    ]
    picks = random_picks(random, 6, 100, 5)
    world = witness(6)
    run_ranks(world.world, lambda t: gtopk_tree.reduce(picks[t.rank], 5, t))
    for rank in range(6):
        assert world.schedule(rank) == seen_by(rank, [*up, *down])


@pytest.mark.parametrize("k", [1, 8, 100])
def test_four_ranks_send_two_messages_of_a_header_and_eight_bytes_an_entry(k: int) -> None:
    # All pick the same k entries: every list merged has k entries, too.
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    world = local_world(4, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "gtopk"))
    for transport in world:
        assert transport.traffic.take() == Traffic(2 * (HEADER_BYTES + 8 * k), 2)


@pytest.mark.parametrize("k", [1, 8, 9])
def test_the_tree_sends_up_once_and_down_to_each_child_with_a_bit_an_entry(k: int) -> None:
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    up, down = HEADER_BYTES + 8 * k, HEADER_BYTES + 8 * k + math.ceil(k / 8)
    world = local_world(6, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "gtopk-tree"))
    children = [3, 0, 1, 0, 1, 0]
    assert [t.traffic.take() for t in world] == [
        Traffic((rank > 0) * up + count * down, (rank > 0) + count)
        for rank, count in enumerate(children)
    ]


def test_a_folded_rank_sends_its_picks_and_gets_a_bit_for_each(witness) -> None:
    k = 9
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    world = witness(3)
    run_ranks(world.world, lambda t: reduce(pick, k, t, "gtopk"))
    sizes = [event.message.size for event in world.events[2]]
    assert sizes == [HEADER_BYTES + 8 * k, HEADER_BYTES + 8 * k + 2]


@every_size
def test_in_topk_allgather_every_rank_sends_the_others_worth_of_lists(size: int) -> None:
    k = 10
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "topk-allgather"))
    rounds = (size - 1).bit_length()
    lists = (size - 1) * (HEADER_BYTES + 8 * k)
    sizes_told = 8 * rounds + 8 * (size - 1)  # each round's count of lists, each list's size
    for transport in world:
        assert transport.traffic.take() == Traffic(lists + sizes_told, rounds)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"algorithm": "ring"},
            "must be one of dense, topk-allgather, gtopk-tree, gtopk, oktopk, hierarchical; got",
        ),
        ({"k": 0}, "k must lie in 1..5 (the vector's length), got 0"),
        ({"k": 6}, "k must lie in 1..5 (the vector's length), got 6"),
        ({"k": -1}, "k must lie in 1..5 (the vector's length), got -1"),
        ({"k": 1}, "at most k = 1 entries may be selected, got 2"),
        (
            {"selected": SparseVector(np.array([1]), np.ones(1, np.float32), 5)},
            "must be int32, got int64",
        ),
        (
            {"selected": SparseVector(np.array([4, 1], np.int32), np.ones(2, np.float32), 5)},
            "strictly increasing, got 4 before 1",
        ),
        ({"selected": SparseVector.empty(0)}, "k must lie in 1..0 (the vector's length), got 2"),
    ],
)
@every_algorithm
def test_bad_arguments_are_refused_before_anything_is_sent(
    algorithm: str, change: dict[str, object], text: str
) -> None:
    (transport,) = local_world(1)
    good = {"selected": entries([(1, 1.0), (2, 1.0)], 5, np.float32), "k": 2}
    with pytest.raises(ValueError, match=re.escape(text)):
        reduce(**{**good, "transport": transport, "algorithm": algorithm, **change})
    assert transport.traffic == Traffic(0, 0)


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (SparseVector.empty(8), "its length is (8 where this rank's is 7|7 where .* is 8)"),
        (SparseVector.empty(7, np.float64), "dtype is float.. where this rank's is float"),
    ],
)
def test_ranks_that_reduce_different_vectors_get_an_error_that_names_a_rank(
    algorithm: str, size: int, other: SparseVector, text: str
) -> None:
    picks = [other, *[SparseVector.empty(7)] * (size - 1)]
    with pytest.raises(MessageError, match=rf"message from rank \d is malformed: .*({text})"):
        run(algorithm, picks, 3)


@pytest.mark.parametrize(
    "other", [SparseVector.empty(4), SparseVector.empty(8, np.float64)], ids=["length", "dtype"]
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_dense_sum_of_different_vectors_is_an_error_that_names_a_rank(
    size: int, other: SparseVector
) -> None:
    picks = [other, *[SparseVector.empty(8)] * (size - 1)]
    with pytest.raises(MessageError, match=r"message from rank \d is malformed: .* bytes"):
        run("dense", picks, 3)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(a, b) for a in ALGORITHMS for b in ALGORITHMS if a != b]
)
def test_a_partner_that_runs_another_algorithm_is_an_error(ours: str, theirs: str) -> None:
    picks = [entries([(rank, 1.0), (3, 2.0)], 9, np.float32) for rank in range(2)]
    with pytest.raises(MessageError, match=r"message from rank \d is malformed"):
        run_ranks(
            local_world(2, timeout_seconds=5),
            lambda t: reduce(picks[t.rank], 2, t, theirs if t.rank == 1 else ours),
        )


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
def test_a_damaged_message_is_an_error_that_names_its_sender(algorithm: str) -> None:
    pick = entries([(1, 1.0), (4, 2.0)], 9, np.float32)
    message = encode(pick, 2).message
    for at in range(message.size):

        def program(transport: LocalTransport, at: int = at) -> object:
            if transport.rank == 1:
                original = transport.send

                def damaging(message: np.ndarray, to: int) -> Callable[[], None]:
                    damaged = message.copy()
                    damaged[damaged.size - 1 - at] ^= 0x40
                    return original(damaged, to)

                transport.send = damaging
            return reduce(pick, 2, transport, algorithm)

        with pytest.raises(MessageError, match="message from rank 1 is malformed"):
            run_ranks(local_world(2, timeout_seconds=5), program)


@merging_algorithm
def test_alive_bits_that_are_missing_are_an_error_not_a_double_return(algorithm: str) -> None:
    pick = entries([(1, 1.0), (4, 2.0)], 9, np.float32)

    def program(transport: LocalTransport) -> object:
        if transport.rank == 2:
            return reduce(pick, 2, transport, algorithm)
        if transport.rank == 0:
            transport.receive(2)
            transport.send(
                encode(pick, 2).message, 2
            )()  # the result, as it would be, without the bits
        return None

    with pytest.raises(MessageError, match=r"rank 0 is malformed: .* values is 0 where .* 1;"):
        run_ranks(local_world(3, timeout_seconds=5), program)


# ---- bugs of others, retold


@every_size
def test_ranks_need_not_be_a_power_of_two(size: int, random: np.random.Generator) -> None:
    # An implementation took log2(P) rounds of pairs, and ran past its list of ranks or hung.
    picks = integer_picks(random, size, 60, 20)
    for update, _ in run("gtopk", picks, 60):
        assert update.to_dense().tolist() == sum(pick.to_dense() for pick in picks).tolist()


@every_algorithm
def test_k_may_grow_and_shrink_from_call_to_call(
    algorithm: str, random: np.random.Generator
) -> None:
    # An implementation sized its buffer by the first k: a larger one ran over, a smaller one got
    # the tail of the last result.
    world = local_world(3, timeout_seconds=30)
    for k in (2, 30, 1, 7):
        picks = random_picks(random, 3, 100, k)
        outcomes = run_ranks(world, lambda t, p=picks, k=k: reduce(p[t.rank], k, t, algorithm))
        assert_nothing_is_lost(picks, outcomes)
        assert bits(outcomes[0][0]) == bits(run(algorithm, picks, k)[0][0])


@pytest.mark.parametrize("algorithm", ["dense", "topk-allgather", *TRUNCATING])
def test_lists_of_different_lengths_lose_no_tail(algorithm: str) -> None:
    # An implementation split the gathered lists into equal parts.
    picks = [
        entries([(index, 1.0) for index in range(rank * 10, rank * 10 + count)], 40, np.float32)
        for rank, count in enumerate([1, 9, 0, 4])
    ]
    expected = sum(pick.to_dense() for pick in picks)
    for update, _ in run(algorithm, picks, 20):
        assert update.to_dense().tolist() == expected.tolist()


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
def test_indices_beyond_what_float32_can_count_arrive(algorithm: str) -> None:
    # Implementations sent indices as float32, exact up to 2^24, or as 16 bits.
    last = [2**16, 2**24 + 1, 2**31 - 2]
    picks = [entries([(index, 1.0)], 2**31 - 1, np.float32) for index in last]
    for update, _ in run(algorithm, picks, 3):
        assert update.indices.tolist() == last


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
def test_vectors_beyond_2_31_elements_are_reduced(algorithm: str) -> None:
    length = 2**40
    picks = [
        SparseVector(np.array([7, 2**31 + rank]), np.array([1.0, 2.0 + rank]), length)
        for rank in range(3)
    ]
    for update, _ in run(algorithm, picks, 4):
        assert pairs_of(update) == [(7, 3), (2**31, 2), (2**31 + 1, 3), (2**31 + 2, 4)]
        assert update.indices.dtype == np.int64


@every_algorithm
def test_fewer_picks_than_ranks_are_enough(algorithm: str) -> None:
    # An implementation divided the number of picks by the number of ranks.
    picks = [SparseVector.empty(30)] * 8 + [entries([(29, 1.0)], 30, np.float32)]
    for update, _ in run(algorithm, picks, 1):
        assert pairs_of(update) == [(29, 1.0)]


@every_algorithm
def test_results_of_a_call_outlive_the_next_one(
    algorithm: str, random: np.random.Generator
) -> None:
    # An implementation returned views of a buffer that the next call filled anew.
    world = local_world(3, timeout_seconds=30)
    first, second = (random_picks(random, 3, 50, 5) for _ in range(2))
    outcomes = run_ranks(world, lambda t: reduce(first[t.rank], 5, t, algorithm))
    before = [(bits(update), bits(returned)) for update, returned in outcomes]
    run_ranks(world, lambda t: reduce(second[t.rank], 5, t, algorithm))
    assert [(bits(update), bits(returned)) for update, returned in outcomes] == before
