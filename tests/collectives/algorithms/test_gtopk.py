"""gtopk's growth, the picks it returns, and its costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, SparseVector, local_world, reduce, run_ranks, wire
from collectives.algorithms import gtopk
from collectives.algorithms.gtopk import kept_sizes
from collectives.kernels import contains, merge
from collectives.transports import Traffic
from collectives.wire import EXACT, HEADER_BYTES, NOBODY, Format
from tests.collectives.algorithms.worlds import (
    bits,
    entries,
    integer_picks,
    pairs_of,
    random_picks,
    run,
    worlds,
)


def paired(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def merged_on_one_rank(picks: list[SparseVector], k: int, growth: float = 1.0) -> SparseVector:
    """Return the result, merged on one rank: folds first, then pairs, then pairs of pairs."""
    count = paired(len(picks))
    nothing = picks[0].take(slice(0))
    guests = picks[count:] + [nothing] * (2 * count - len(picks))
    lists = [merge(a, b, k) for a, b in zip(picks[:count], guests, strict=True)]
    for keep in kept_sizes(k, growth, count.bit_length() - 1, picks[0].length):
        lists = [merge(lists[at], lists[at + 1], keep) for at in range(0, len(lists), 2)]
    return lists[0]


def cost(size: int, k: int, length: int, **options: Any) -> list[Traffic]:
    """Return what each rank sent; every rank picks k entries at random."""
    random = np.random.default_rng(size)
    world = local_world(size, timeout_seconds=30)
    picks = []
    for _ in range(size):
        indices = np.unique(random.integers(0, length, 2 * k))[:k].astype(np.int32)
        picks.append(SparseVector(indices, 1 + random.random(k).astype(np.float32), length))
    run_ranks(world, lambda t: reduce(picks[t.rank], k, t, **options))
    return [transport.traffic.read_and_reset() for transport in world]


# ---- the result


@settings(max_examples=80)
@given(worlds(np.float32), st.sampled_from([1.0, 2.0, 5.0]))
def test_update_equals_merging_on_one_rank(
    world: tuple[int, list[SparseVector]], growth: float
) -> None:
    k, picks = world
    expected = merged_on_one_rank(picks, k, growth)
    for update, _ in run("gtopk", picks, k, growth=growth):
        assert bits(update) == bits(expected)
        assert update.entries <= max(k, round(growth * k))


@pytest.mark.parametrize("size", [4, 6, 8, 13])
def test_larger_growth_drops_less(size: int, random: np.random.Generator) -> None:
    picks = random_picks(random, size, 2000, 30, np.float64)
    kept = [
        np.abs(run("gtopk", picks, 30, growth=growth)[0][0].values).sum()
        for growth in (1.0, 2.0, 4.0, 100.0)
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_lists_that_double_every_round_drop_nothing(size: int, random: np.random.Generator) -> None:
    picks = [p._replace(values=abs(p.values) + 1) for p in integer_picks(random, size, 500, 20)]
    expected = np.sum([pick.to_dense() for pick in picks], axis=0)
    for update, returned in run("gtopk", picks, 20, growth=float(size)):
        assert update.to_dense().tolist() == expected.tolist()
        assert returned.entries == 0


# ---- returned picks


@settings(max_examples=60)
@given(worlds(np.float32))
def test_dead_picks_return_to_their_owners_unchanged(world: tuple[int, list[SparseVector]]) -> None:
    k, picks = world
    for pick, (_, returned) in zip(picks, run("gtopk", picks, k, growth=2.0), strict=True):
        assert bits(returned) == bits(pick.where(contains(returned.indices, pick.indices)))


@pytest.mark.parametrize("values", ["bf16", "fp16", "int8", "int4", "int3"])
def test_dead_pick_returns_unrounded(values: str) -> None:
    # The four-rank example with rounding: 5:1.01 is dropped in the first round, and index 5 comes
    # back through ranks 2 and 3. Rank 2 gets the rounding error of its 3.03, and nothing of the
    # 1.01. Rank 4 is folded into rank 0, which reports that its pick is dead.
    picks = [
        entries(pairs, 10, np.float64)
        for pairs in ([(5, 1.01)], [(7, 2.02)], [(5, 3.03), (6, 2.9)], [(9, 0.11)], [(8, 0.07)])
    ]
    outcomes = run("gtopk", picks, 2, Format("raw", values))
    update = outcomes[0][0]
    assert update.indices.tolist() == [5, 6]
    returned = [dict(pairs_of(vector)) for _, vector in outcomes]
    assert returned[1] == {7: 2.02}
    assert returned[3][9] == 0.11
    assert returned[4] == {8: 0.07}
    for index, total in ((5, 1.01 + 3.03), (6, 2.9)):
        back = sum(vector.get(index, 0.0) for vector in returned)
        assert update.to_dense()[index] + back == pytest.approx(total, rel=1e-15)
        assert update.to_dense()[index] != total


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rounding_errors_of_a_list_are_split_over_its_holders(
    size: int, random: np.random.Generator
) -> None:
    # All pick the same entries, so none dies; in round j a rank gets the rounding errors of every
    # 2^j-th entry.
    pick = random_picks(random, 1, 500, 64, np.float64)[0]
    outcomes = run("gtopk", [pick] * size, 64, Format("raw", "bf16"))
    first = wire.encode(pick, 64, Format("raw", "bf16")).vector
    for rank, (update, returned) in enumerate(outcomes):
        # Doubling is exact, so only the first round rounds, and each rank rounds its own picks.
        assert bits(update) == bits(first._replace(values=size * first.values))
        assert bits(returned) == bits(pick.minus(first)), rank


# ---- the cost


@pytest.mark.parametrize("size", range(2, 18))
@pytest.mark.parametrize("k", [1, 9])
def test_rank_sends_one_list_per_round(size: int, k: int) -> None:
    message = HEADER_BYTES + 8 * k
    rounds = paired(size).bit_length() - 1
    traffic = cost(size, k, 1000)
    for rank in range(size):
        if rank >= paired(size):
            expected = Traffic(message, 1)
        elif rank + paired(size) < size:
            expected = Traffic((rounds + 1) * message + math.ceil(k / 8), rounds + 1)
        else:
            expected = Traffic(rounds * message, rounds)
        assert traffic[rank] == expected


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("growth", [2.0, 4.0])
def test_growing_lists_send_what_the_round_before_kept(size: int, growth: float) -> None:
    k = 10
    kept = kept_sizes(k, growth, paired(size).bit_length() - 1, 100_000)
    sent = [k, *kept[:-1]]
    for traffic in cost(size, k, 10**8, growth=growth):  # no index twice: every list is full
        assert traffic == Traffic(sum(HEADER_BYTES + 8 * m for m in sent), len(sent))
    assert sum(sent) < (len(sent) + growth) * k


# ---- errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"growth": 0.5}, "growth must be a number from 1 on, got 0.5"),
        ({"growth": math.inf}, "growth must be a number from 1 on, got inf"),
    ],
)
def test_options_out_of_bounds_are_refused_before_sending(
    options: dict[str, Any], text: str
) -> None:
    world = local_world(2, 5)
    for transport in world:
        with pytest.raises(ValueError, match=text):
            reduce(SparseVector.empty(5), 2, transport, "gtopk", **options)
        assert transport.traffic == Traffic(0, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_different_growth_get_error_that_names_a_rank(size: int) -> None:
    picks = [entries([(rank, 1.0), (7, 1.0)], 9, np.float32) for rank in range(size)]
    with pytest.raises(MessageError, match=r"the message from rank \d "):
        run_ranks(
            local_world(size, 5),
            lambda t: reduce(picks[t.rank], 2, t, growth=2.0 if t.rank == size - 1 else 1.0),
        )


def test_ranks_with_different_k_get_error_that_quotes_both_values() -> None:
    pick = entries([(1, 1.0)], 9, np.float32)
    with pytest.raises(MessageError, match=r"from rank \d .* k is [23] where this rank's is [23]"):
        run_ranks(local_world(2, 5), lambda t: reduce(pick, 2 + t.rank, t))


def test_partners_of_an_exchange_both_get_the_largest_of_the_sum(
    random: np.random.Generator,
) -> None:
    lists = [
        entries(
            [
                (int(i), float(random.standard_normal()))
                for i in np.unique(random.integers(0, 5000, 2000))
            ],
            5000,
            np.float64,
        )
        for _ in range(2)
    ]
    swapped = run_ranks(
        local_world(2, 30),
        lambda t: gtopk.exchange_and_merge(lists[t.rank], NOBODY, 700, t, 1 - t.rank, EXACT),
    )
    merged = merge(*lists, 700)
    for one, _, _ in swapped:
        assert bits(one) == bits(merged)
