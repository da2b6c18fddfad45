"""NaN or infinity on any rank raises on every rank, without extra messages or lost gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import NonFiniteError, SparseVector, local_world, reduce, run_ranks
from collectives.algorithms.conservation import check_finite, lowest_refusing
from collectives.transports import LocalTransport
from collectives.wire import NOBODY
from tests.collectives.algorithms.worlds import VARIANTS, bits, random_picks

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def with_values(pick: SparseVector, *values: float) -> SparseVector:
    changed = pick.values.copy()
    changed[: len(values)] = values
    return pick._replace(values=changed)


def outcomes(variant: str, picks: list[SparseVector], k: int) -> tuple[list[Any], list[Any]]:
    """Return each rank's error or result, and its traffic."""
    algorithm, options = VARIANTS[variant]
    usual = options(len(picks), k, picks[0].length)
    world = local_world(len(picks), timeout_seconds=30)

    def program(transport: LocalTransport) -> Any:
        try:
            return reduce(picks[transport.rank], k, transport, algorithm, **usual)
        except NonFiniteError as error:
            return error

    return run_ranks(world, program), [transport.traffic.read_and_reset() for transport in world]


@every_variant
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9])
def test_non_finite_values_raise_the_same_error_on_all_ranks(
    variant: str, size: int, bad: float, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 60, 10)
    for refusing in ([size - 1], [0], [size // 2, size - 1], list(range(size))):
        broken = [
            with_values(pick, bad) if rank in refusing else pick for rank, pick in enumerate(picks)
        ]
        before = [bits(pick) for pick in broken]
        raised, _ = outcomes(variant, broken, 10)
        assert {(type(error), error.rank) for error in raised} == {(NonFiniteError, refusing[0])}
        assert len({str(error) for error in raised}) == 1
        assert f"rank {refusing[0]} found NaN or infinity" in str(raised[0])
        assert [bits(pick) for pick in broken] == before


@every_variant
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_overflowing_sum_raises_on_every_rank(variant: str, size: int) -> None:
    largest = np.finfo(np.float32).max
    pick = SparseVector(np.array([2, 5], np.int32), np.array([1, largest], np.float32), 7)
    raised, _ = outcomes(variant, [pick] * size, 2)
    assert {type(error) for error in raised} == {NonFiniteError}
    assert len({str(error) for error in raised}) == 1


def test_overflow_error_names_the_lowest_rank_that_found_it() -> None:
    largest = np.finfo(np.float32).max
    picks = [
        SparseVector(np.array([5], np.int32), np.array([value], np.float32), 7)
        for value in [1, 1, 1, 1, largest, largest, 1, 1]
    ]
    raised, _ = outcomes("gtopk", picks, 1)
    assert [error.rank for error in raised] == [4] * 8


@every_variant
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_overflow_found_by_some_ranks_ends_all_ranks_alike(variant: str, size: int) -> None:
    # The sum of ranks 0 and 1 overflows; summed with the rest in another order, it may not.
    largest = float(np.finfo(np.float32).max)
    picks = [
        SparseVector(np.array([5], np.int32), np.array([value], np.float32), 7)
        for value in ([largest, largest] + [-largest / 2] * size)[:size]
    ]
    ends, _ = outcomes(variant, picks, 1)
    assert len({type(end) for end in ends}) == 1


@pytest.mark.parametrize(
    "variant", [variant for variant in VARIANTS if variant != "dense" and "oktopk" not in variant]
)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_refused_reduction_sends_as_many_messages_and_fewer_bytes(
    variant: str, size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 600, 100)
    _, usual = outcomes(variant, picks, 100)
    broken = [with_values(pick, np.nan) if rank == 0 else pick for rank, pick in enumerate(picks)]
    _, refused = outcomes(variant, broken, 100)
    for before, after in zip(usual, refused, strict=True):
        assert after.sent_messages == before.sent_messages
        assert after.sent_bytes <= before.sent_bytes
    assert sum(t.sent_bytes for t in refused) < sum(t.sent_bytes for t in usual)


def test_rank_that_knows_of_a_refusal_sends_an_empty_list(
    random: np.random.Generator,
) -> None:
    picks = random_picks(random, 3, 600, 100)
    _, (usual, _, _) = outcomes("gtopk", picks, 100)
    _, (refused, _, _) = outcomes("gtopk", [*picks[:2], with_values(picks[2], np.nan)], 100)
    assert refused.sent_bytes < usual.sent_bytes / 4


@every_variant
def test_reduction_after_a_refused_one_succeeds(variant: str, random: np.random.Generator) -> None:
    algorithm, options = VARIANTS[variant]
    picks = random_picks(random, 5, 60, 10)
    usual = options(5, 10, 60)
    world = local_world(5, timeout_seconds=30)

    def program(transport: LocalTransport) -> Any:
        pick = picks[transport.rank]
        with pytest.raises(NonFiniteError):
            reduce(with_values(pick, np.nan), 10, transport, algorithm, **usual)
        update, _ = reduce(pick, 10, transport, algorithm, **usual)
        transport.announce_departure("it is done")  # a rank may leave after the last reduction
        return bits(update)

    assert len(set(run_ranks(world, program))) == 1


def test_non_finite_error_on_a_subset_names_the_rank_of_the_world(
    random: np.random.Generator,
) -> None:
    picks = random_picks(random, 4, 60, 10)

    def program(transport: LocalTransport) -> Any:
        if transport.rank == 0:
            return None
        part = transport.subset([3, 1, 2])
        pick = picks[transport.rank]
        bad = with_values(pick, np.nan) if transport.rank == 3 else pick
        raised = []
        for algorithm in ("dense", "gtopk", "oktopk", "hierarchical"):
            with pytest.raises(NonFiniteError) as caught:
                reduce(bad, 10, part, algorithm)
            raised.append(caught.value.rank)
        return raised

    _, *raised = run_ranks(local_world(4, 30), program)
    assert raised == [[3] * 4] * 3


def test_lowest_refusing_returns_the_lowest_rank_or_nobody() -> None:
    assert lowest_refusing() == lowest_refusing(NOBODY) == lowest_refusing(NOBODY, NOBODY) == NOBODY
    assert lowest_refusing(4, NOBODY, 2, 3) == 2


def test_check_finite_empties_the_vector_once_any_rank_refused() -> None:
    good = SparseVector(np.array([2], np.int32), np.array([1.0]), 5)
    bad = good._replace(values=np.array([np.inf]))
    assert check_finite(good, 3) == (good, NOBODY)
    assert check_finite(bad, 3)[1] == 3
    assert check_finite(bad, 3, refused_by=1)[1] == 1
    assert check_finite(bad, 3, refused_by=4)[1] == 3
    assert check_finite(good, 3, refused_by=4)[1] == 4
    assert {check_finite(bad, 3)[0].entries, check_finite(good, 3, refused_by=4)[0].entries} == {0}
