"""oktopk is exact, and sends as many bytes as its docstring says, for any picks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, SparseVector, local_world, reduce, run_ranks, select
from collectives.algorithms import Regions
from collectives.kernels import contains, sum_by_index
from collectives.transports import Traffic
from collectives.wire import HEADER_BYTES, Format
from tests.collectives.algorithms.worlds import (
    WHERE,
    bits,
    entries,
    pairs_of,
    picks_where,
    random_picks,
    run,
    worlds,
)
from tests.matrix import some_of


def largest_of_sum(picks: list[SparseVector], k_out: int) -> SparseVector:
    """Return the exact result: the largest entries of all picks, summed in rank order."""
    return select(sum_by_index(picks).to_dense(), k_out)[0]


def overhead_bytes(size: int, rounds: int = 4) -> int:
    """Return the maximum bytes besides entries that a rank sends in a step that draws boundaries.

    rounds: of the threshold search.
    """
    gathers = (1 + rounds + 1) * 8 * ((size - 1).bit_length() + size - 1)  # how the allgather packs
    headers = 3 * (size - 1) * HEADER_BYTES
    samples = rounds * (size - 1) * (HEADER_BYTES + 3 * 8 + 64 * 4)
    quantiles = (size - 1) * (HEADER_BYTES + 4 * size * 8)
    return gathers + headers + samples + quantiles


# ---- the result


@settings(max_examples=20)
@given(worlds(np.float32), st.integers(1, 40))
def test_update_is_the_largest_of_the_sum_of_all_picks(
    world: tuple[int, list[SparseVector]], k_out: int
) -> None:
    k, picks = world
    k_out = min(k_out, picks[0].length)
    expected = largest_of_sum(picks, k_out)
    for update, _ in run("oktopk", picks, k, k_out=k_out):
        assert bits(update) == bits(expected)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_update_is_exact_for_any_pattern_of_indices(
    where: str, size: int, random: np.random.Generator
) -> None:
    picks = picks_where(where, random, size, 50_000, 600)
    for k_out in (1, 600, 2400):
        expected = largest_of_sum(picks, k_out)
        assert all(bits(u) == bits(expected) for u, _ in run("oktopk", picks, 600, k_out=k_out))


@settings(max_examples=20)
@given(worlds(np.float32))
def test_pick_is_in_the_update_or_returns_unchanged(world: tuple[int, list[SparseVector]]) -> None:
    k, picks = world
    for pick, (update, returned) in zip(picks, run("oktopk", picks, k), strict=True):
        assert bits(returned) == bits(pick.where(~contains(update.indices, pick.indices)))


def test_four_rank_example_loses_nothing() -> None:
    # gtopk drops rank 0's 5:1.0 on the way and updates 5:3.0; oktopk updates 5 with the whole sum.
    picks = [
        entries(pairs, 10, np.float64) for pairs in ([(5, 1.0)], [(7, 2.0)], [(5, 3.0)], [(9, 0.1)])
    ]
    outcomes = run("oktopk", picks, 1)
    assert [pairs_of(update) for update, _ in outcomes] == [[(5, 4.0)]] * 4
    assert [pairs_of(returned) for _, returned in outcomes] == [[], [(7, 2.0)], [], [(9, 0.1)]]


@pytest.mark.parametrize("size", [3, 8])
def test_reused_boundaries_do_not_change_the_update(
    size: int, random: np.random.Generator, monkeypatch
) -> None:
    monkeypatch.setattr("collectives.algorithms.regions.EVERY", 3)
    world = local_world(size, timeout_seconds=30)
    kept = [Regions() for _ in world]
    for step in range(8):
        where = WHERE[step % len(WHERE)]
        picks = picks_where(where, random, size, 9000, 200)
        expected = largest_of_sum(picks, 200)
        outcomes = run_ranks(
            world,
            lambda t, picks=picks: reduce(picks[t.rank], 200, t, "oktopk", regions=kept[t.rank]),
        )
        assert all(bits(update) == bits(expected) for update, _ in outcomes)


# ---- the cost


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", some_of([2, 3, 4, 7, 8, 16, 17], 2, 7, 16))
def test_rank_sends_at_most_six_k_words_for_any_indices(
    where: str, size: int, random: np.random.Generator
) -> None:
    k = 4000
    picks = picks_where(where, random, size, 500_000, k)
    for k_out in (k, 4 * k):
        words = 2 * k * (size - 1) / size + 4 * k_out * (size - 1) / size
        world = local_world(size, timeout_seconds=60)
        run_ranks(world, lambda t, k_out=k_out: reduce(picks[t.rank], k, t, "oktopk", k_out=k_out))
        rounds = 2 * size + 2 * math.log2(size)
        for transport in world:
            sent = transport.traffic.read_and_reset()
            assert sent.sent_bytes <= 4 * words + overhead_bytes(size)
            assert sent.sent_messages <= 2 * (size - 1) + 6 * (size - 1).bit_length()
            assert size < 4 or sent.sent_messages <= rounds + 2


@pytest.mark.parametrize("size", [2, 4, 9, 16])
@pytest.mark.parametrize("loud", ["all in one region", "one rank's own"])
def test_owner_of_the_whole_update_sends_at_most_six_k_words(
    size: int, loud: str, random: np.random.Generator
) -> None:
    k = 4000
    picks = picks_where("anywhere", random, size, 500_000, k)
    for rank, pick in enumerate(picks):
        in_first = pick.indices < 500_000 // size
        if loud == "all in one region" or rank == 0:
            pick.values[in_first] *= 1000
    world = local_world(size, timeout_seconds=60)
    run_ranks(world, lambda t: reduce(picks[t.rank], k, t, "oktopk"))
    # Each rank's picks are spread evenly up to random fluctuations.
    by_chance = 2 * 5 * math.sqrt(k / size)
    for transport in world:
        sent = transport.traffic.read_and_reset()
        words = 6 * k * (size - 1) / size + by_chance
        assert sent.sent_bytes <= 4 * words + overhead_bytes(size)
        assert sent.sent_messages <= 2 * (size - 1) + 6 * (size - 1).bit_length()


@settings(max_examples=20)
@given(worlds(np.float32), st.integers(1, 30))
def test_rank_sends_at_most_two_words_per_pick_and_four_per_update_entry(
    world: tuple[int, list[SparseVector]], k_out: int
) -> None:
    k, picks = world
    size = len(picks)
    k_out = min(k_out, picks[0].length)
    ranks = local_world(size, timeout_seconds=30)
    run_ranks(ranks, lambda t: reduce(picks[t.rank], k, t, "oktopk", k_out=k_out))
    words = 2 * k + 4 * math.ceil(k_out / size) * (size - 1)
    for transport in ranks:
        assert transport.traffic.read_and_reset().sent_bytes <= 4 * words + overhead_bytes(size)


@pytest.mark.parametrize("size", range(2, 18))
def test_sent_bytes_equal_the_formula_when_all_ranks_pick_the_same(size: int) -> None:
    # k = 4 P indices, 4 in each region. The update has all sums, so balancing moves nothing.
    k = 4 * size
    pick = SparseVector(np.arange(k, dtype=np.int32), np.ones(k, np.float32), k)
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "oktopk"))
    log, others = (size - 1).bit_length(), size - 1
    packing = 8 * (log + others)  # of an allgather
    quantiles = others * (HEADER_BYTES + 8 * k) + packing  # 4 P quantiles of one index each
    split = others * (HEADER_BYTES + 8 * 4)
    threshold = others * (HEADER_BYTES + 3 * 8 + 4 * min(64, k)) + packing  # one round suffices
    gather = others * (HEADER_BYTES + 8 * 4) + packing
    for transport in world:
        sent = transport.traffic.read_and_reset()
        assert sent == Traffic(quantiles + split + threshold + gather, others + 3 * log)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_kept_boundaries_save_one_allgather(size: int, random: np.random.Generator) -> None:
    picks = random_picks(random, size, 3000, 100)
    world = local_world(size, timeout_seconds=30)
    kept = [Regions() for _ in world]
    sent = []
    for _ in range(2):
        run_ranks(world, lambda t: reduce(picks[t.rank], 100, t, "oktopk", regions=kept[t.rank]))
        sent.append(world[0].traffic.read_and_reset())
    log = (size - 1).bit_length()
    quantiles = (size - 1) * (HEADER_BYTES + 8 * min(100, 4 * size)) + 8 * (log + size - 1)
    assert sent[0].sent_bytes - sent[1].sent_bytes == quantiles
    assert sent[0].sent_messages - sent[1].sent_messages == log


# ---- rounding


@pytest.mark.parametrize("values", ["bf16", "fp16", "int8"])
def test_rounded_values_are_close_and_rounding_errors_return(
    values: str, random: np.random.Generator
) -> None:
    picks = random_picks(random, 5, 2000, 100, np.float64)
    exact, rounded = run("oktopk", picks, 100), run("oktopk", picks, 100, Format("raw", values))
    update = rounded[0][0].to_dense()
    assert np.abs(update - sum_by_index(picks).to_dense())[rounded[0][0].indices].max() < 0.2
    assert bits(exact[0][0]) != bits(rounded[0][0])
    total = update + sum(returned.to_dense() for _, returned in rounded)
    np.testing.assert_allclose(total, sum_by_index(picks).to_dense(), rtol=1e-12, atol=1e-14)


# ---- errors


@pytest.mark.parametrize("k_out", [0, -1, 6])
def test_k_out_outside_of_the_vector_is_refused(k_out: int) -> None:
    (transport,) = local_world(1)
    with pytest.raises(ValueError, match=rf"k_out must lie in 1\.\.5 .* got {k_out}"):
        reduce(SparseVector.empty(5), 2, transport, "oktopk", k_out=k_out)


def test_ranks_with_different_k_out_get_error_that_quotes_both_values() -> None:
    picks = [entries([(1, 1.0), (2, 2.0), (5, 1.0)], 9, np.float32)] * 3
    with pytest.raises(MessageError, match=r"from rank \d .* k is \d where this rank's is \d"):
        run_ranks(
            local_world(3, 5),
            lambda t: reduce(picks[t.rank], 3, t, "oktopk", k_out=2 if t.rank else 3),
        )


def test_ranks_with_regions_of_different_ages_get_an_error() -> None:
    world = local_world(2, 5)
    kept = [Regions() for _ in world]
    pick = entries([(1, 1.0), (6, 2.0)], 9, np.float32)

    def program(transport):
        return reduce(pick, 2, transport, "oktopk", regions=kept[transport.rank])

    run_ranks(world, program)
    kept[1] = Regions()
    with pytest.raises(MessageError, match=r"from rank \d"):
        run_ranks(world, program)


def test_entries_outside_of_a_region_raise_an_error(random: np.random.Generator) -> None:
    world = local_world(2, 5)
    kept = [Regions() for _ in world]
    low, high = (entries([(at, 1.0), (at + 1, 2.0)], 99, np.float32) for at in (1, 90))
    for picks in ([low, low], [high, high]):  # the ranks draw different boundaries
        one = local_world(2, 5)
        fresh = [Regions() for _ in one]
        run_ranks(
            one,
            lambda t, p=picks, f=fresh: reduce(p[t.rank], 2, t, "oktopk", regions=f[t.rank]),
        )
        kept[picks[0] is high] = fresh[0]
    with pytest.raises(MessageError, match=r"entries outside of \d+\.\.\d+, this rank's region"):
        run_ranks(
            world, lambda t: reduce([low, high][t.rank], 2, t, "oktopk", regions=kept[t.rank])
        )
