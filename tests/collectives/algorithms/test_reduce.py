"""reduce with NumPy arrays: any ranks, several reductions at once, clear errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ALGORITHMS, PeerError, SparseVector, local_world, reduce, run_ranks
from collectives.transports import LocalTransport, Traffic
from collectives.wire import EXACT, Format
from tests.collectives.algorithms.worlds import (
    VARIANTS,
    assert_nothing_is_lost,
    bits,
    random_picks,
    run,
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [[2], [1, 3], [6, 0, 5], [7, 6, 4, 3, 1]])
def test_any_subset_of_ranks_reduces_alone(
    variant: str, ranks: list[int], random: np.random.Generator
) -> None:
    picks = random_picks(random, len(ranks), 300, 20, np.float64)
    algorithm, options = VARIANTS[variant]
    usual = options(len(ranks), 20, 300)

    def program(transport: LocalTransport) -> Any:
        if transport.rank not in ranks:
            return None
        part = transport.subset(ranks)
        return reduce(picks[part.rank], 20, part, algorithm, **usual)

    results = run_ranks(local_world(8, 30), program)
    outcomes = [results[rank] for rank in ranks]
    assert_nothing_is_lost(picks, outcomes, additions=4 * len(ranks))
    for one, other in zip(outcomes, run(variant, picks, 20), strict=True):
        assert [bits(vector) for vector in one] == [bits(vector) for vector in other]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_concurrent_reductions_on_own_channels_give_the_same_bits(
    size: int, random: np.random.Generator
) -> None:
    variants = list(VARIANTS)
    picks = [random_picks(random, size, 2000, 100) for _ in variants]
    world = local_world(size, 30)

    def program(transport: LocalTransport) -> list[Any]:
        def one(number: int) -> Any:
            algorithm, options = VARIANTS[variants[number]]
            return reduce(
                picks[number][transport.rank],
                100,
                transport.channel(number),
                algorithm,
                **options(size, 100, 2000),
            )

        with ThreadPoolExecutor(len(variants)) as threads:
            order = list(range(len(variants)))
            np.random.default_rng(transport.rank).shuffle(order)  # a different order on each rank
            done = dict(zip(order, threads.map(one, order), strict=True))
        return [done[number] for number in range(len(variants))]

    together = run_ranks(world, program)
    for number, variant in enumerate(variants):
        alone = run(variant, picks[number], 100)
        for rank in range(size):
            for one, other in zip(together[rank][number], alone[rank], strict=True):
                assert bits(one) == bits(other)


@pytest.mark.parametrize(
    ("algorithm", "option", "text"),
    [
        ("gtopk", "grwoth", "'gtopk' has no option 'grwoth'; it has growth"),
        ("oktopk", "growth", "'oktopk' has no option 'growth'; it has k_out, regions"),
        ("dense", "k_out", "'dense' has no option 'k_out'; it has none"),
        ("topk-allgather", "growth", "'topk-allgather' has no option 'growth'; it has none"),
        ("gtopk-tree", "growth", "'gtopk-tree' has no option 'growth'; it has put_back"),
        ("hierarchical", "grwoth", "'gtopk' has no option 'grwoth'; it has growth"),
    ],
)
def test_unknown_option_is_refused_with_a_list_of_the_options(
    algorithm: str, option: str, text: str
) -> None:
    (transport,) = local_world(1)
    with pytest.raises(ValueError, match=text):
        reduce(SparseVector.empty(5), 2, transport, algorithm, **{option: 1})
    assert transport.traffic == Traffic(0, 0)


@pytest.mark.parametrize("values", [torch.ones(2), [1.0, 1.0]], ids=["tensor", "list"])
def test_values_that_are_not_arrays_are_refused(values: Any) -> None:
    (transport,) = local_world(1)
    with pytest.raises(TypeError, match=r"must be NumPy's or CuPy's, got .*: tensor\.numpy\(\)"):
        reduce(SparseVector(np.array([1, 3], np.int32), values, 5), 2, transport)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "format", [Format("morse", "exact"), Format("raw", "fp4")], ids=["indices", "values"]
)
def test_unknown_format_is_refused(algorithm: str, format: Format) -> None:
    (transport,) = local_world(1)
    with pytest.raises(ValueError, match=r"must be one of .*; got '(morse|fp4)'"):
        reduce(SparseVector.empty(5), 2, transport, algorithm, format=format)


@pytest.mark.parametrize("algorithm", ["topk-allgather", "gtopk-tree", "gtopk", "oktopk"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_departed_peer_raises_error_that_names_the_reduction(algorithm: str, size: int) -> None:
    world = local_world(size, 30)

    def program(transport: LocalTransport) -> Any:
        if transport.rank == size - 1:
            transport.announce_departure("it had enough")
            return None
        with pytest.raises(PeerError, match=f"it had enough.*in a reduction by {algorithm}"):
            reduce(SparseVector.empty(9), 2, transport, algorithm)
        transport.announce_departure("its peer is gone")
        return None

    run_ranks(world, program)


@pytest.mark.parametrize("algorithm", ["gtopk", "hierarchical", "oktopk"])
def test_refused_option_does_not_disturb_the_next_reduction(algorithm: str) -> None:
    bad = {"oktopk": {"k_out": 0}}.get(algorithm, {"growth": 0.0})
    pick = SparseVector(np.array([3], np.int32), np.ones(1, np.float32), 9)

    def program(transport: LocalTransport) -> list[float]:
        with pytest.raises(ValueError, match=r"got 0"):
            reduce(pick, 2, transport, algorithm, **bad)
        update, _ = reduce(pick, 2, transport, algorithm, format=EXACT)
        transport.announce_departure("it is done")
        return update.values.tolist()

    assert run_ranks(local_world(3, 30), program) == [[3.0]] * 3
