"""The threshold is exact: each region's quota is the same as after sorting all entries."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, SparseVector, local_world, run_ranks
from collectives.algorithms import threshold
from collectives.algorithms.regions import quantile_ends
from collectives.algorithms.threshold import RegionQuotas, region_quotas
from collectives.wire import HEADER_BYTES, NOBODY, encode

LENGTH = 50_000


def vector(values: list[float]) -> SparseVector:
    array = np.array(values, np.float32)
    return SparseVector(np.arange(array.size, dtype=np.int32), array, LENGTH)


def quotas_of_all_ranks(
    regions: list[list[float]], wanted: int, owners: list[int] | None = None, **given: list[int]
) -> RegionQuotas:
    """Return the quotas, after checking that all ranks have the same."""
    size = len(regions)
    owners = owners or list(range(size))
    loads, refused = given.get("loads", [0] * size), given.get("refused", [NOBODY] * size)
    rank_quotas = run_ranks(
        local_world(size, timeout_seconds=30),
        lambda t: region_quotas(
            vector(regions[owners.index(t.rank)]),
            wanted,
            owners,
            t,
            loads[t.rank],
            refused[t.rank],
        ),
    )
    assert all(one == rank_quotas[0] for one in rank_quotas)
    return rank_quotas[0]


def by_sorting(regions: list[list[float]], wanted: int) -> list[int]:
    order = sorted(
        (-abs(value), region, at)
        for region, values in enumerate(regions)
        for at, value in enumerate(values)
    )
    return [sum(region == r for _, region, _ in order[:wanted]) for r in range(len(regions))]


@settings(max_examples=150)
@given(
    st.lists(
        st.lists(st.sampled_from([1.0, -1.0, 2.0, 0.5]) | st.floats(0.25, 8, width=32)),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_region_quotas_equal_those_of_sorting(
    regions: list[list[float]], wanted: int, random
) -> None:
    owners = list(range(len(regions)))
    random.shuffle(owners)
    assert quotas_of_all_ranks(regions, wanted, owners).counts == by_sorting(regions, wanted)


@pytest.mark.parametrize("wanted", [1, 63, 64, 65, 1000, 4001, 9999, 10_000, 20_000])
@pytest.mark.parametrize("kind", ["random", "uneven", "ties", "all equal", "exponents"])
def test_region_quotas_of_thousands_of_entries_are_exact(
    kind: str, wanted: int, random: np.random.Generator
) -> None:
    sizes = [10_000, 0, 30, 1] if kind == "uneven" else [2500] * 4
    draw = {
        "random": lambda m: random.standard_normal(m),
        "uneven": lambda m: random.standard_normal(m),
        "ties": lambda m: np.round(random.standard_normal(m)) + 0.5,
        "all equal": lambda m: np.ones(m),
        "exponents": lambda m: 2.0 ** random.integers(-100, 100, m),
    }[kind]
    regions = [draw(size).astype(np.float32).tolist() for size in sizes]
    assert quotas_of_all_ranks(regions, wanted).counts == by_sorting(regions, wanted)


@pytest.mark.parametrize("wanted", [100, 1000, 3000, 6000])
@pytest.mark.parametrize("without", range(5))
def test_empty_and_decided_regions_keep_quotas_exact(wanted: int, without: int) -> None:
    # Ties decide earlier regions in a single round.
    regions = [[2.0] * (40 * region) + [1.0] * 2000 for region in range(5)]
    regions[without] = []
    assert quotas_of_all_ranks(regions, wanted).counts == by_sorting(regions, wanted)


def test_three_rounds_suffice_for_25_thousand_entries_on_each_of_16_ranks(
    random: np.random.Generator,
) -> None:
    world = local_world(16, timeout_seconds=60)
    regions = [vector(random.standard_normal(25_000).tolist()) for _ in range(16)]
    run_ranks(
        world,
        lambda t: region_quotas(regions[t.rank], 25_000, list(range(16)), t, 0, NOBODY),
    )
    for transport in world:
        traffic = transport.traffic.read_and_reset()
        assert traffic.sent_messages == 3 * 4  # log2 P each
        assert traffic.sent_bytes == 3 * (15 * (HEADER_BYTES + 3 * 8 + 64 * 4 + 8) + 4 * 8)


def test_threshold_search_rounds_are_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "QUANTILES", 2)
    wanted = 5
    drawn = [
        (
            line[:20].count("in"),
            [float(v) for v in window.split()],
            [float(v) for v in sent.split()],
        )
        for line, window, sent in re.findall(
            r"region \d    ([in ]+\| ([\d ]+) \| out) +sends ((?:\d )+)", threshold.__doc__
        )
    ]
    first, second = drawn[:2], drawn[2:]

    def region_counts(
        regions: list[tuple[int, list[float], list[float]]],
    ) -> list[threshold._RegionCounts]:
        for _, window, sent in regions:
            assert sent == [window[end - 1] for end in quantile_ends(len(window), 2)]
        return [
            threshold._RegionCounts(low, low + len(window), 0, NOBODY, -np.array(sent))
            for low, window, sent in regions
        ]

    before, last = threshold._Search(region_counts(first)).bracket(
        wanted - sum(low for low, *_ in first)
    )
    assert before is None  # selected entries do not change
    for region, (low, window, _) in enumerate(first):
        keys = np.array([-99.0] * low + [-value for value in window])
        high = threshold._Search(region_counts(first)).count(last, keys, region)
        assert window[: high - low] == second[region][1]

    exact = threshold._Search(region_counts(second))
    assert exact.is_exact
    _, last = exact.bracket(wanted - sum(low for low, *_ in second))
    assert exact.counts(last) == [3, 2]  # 9 and 8 besides the selected ones


def test_all_ranks_learn_the_loads_and_the_lowest_refusing_rank() -> None:
    quotas = quotas_of_all_ranks(
        [[1.0], [2.0], []], 1, owners=[2, 0, 1], loads=[7, 8, 9], refused=[-1, 2, 1]
    )
    assert quotas.loads == [9, 7, 8]
    assert quotas.refused_by == 1


def test_ranks_with_different_k_out_get_error_that_quotes_both_values() -> None:
    with pytest.raises(MessageError, match=r"from rank \d .* k is [23] where this rank's is [23]"):
        run_ranks(
            local_world(2, timeout_seconds=5),
            lambda t: region_quotas(vector([1.0, 2.0, 3.0]), 2 + t.rank, [0, 1], t, 0, NOBODY),
        )


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (2, 1), (0, 4)])
def test_impossible_counts_in_a_message_raise_an_error(low: int, high: int) -> None:
    def program(transport):
        if transport.rank == 0:
            return region_quotas(vector([1.0, 2.0, 3.0]), 3, [0, 1], transport, 0, NOBODY)
        extra = np.zeros(3 * 8 + 3 * 4, np.uint8)
        extra[:16].view(np.int64)[:] = low, high
        message = encode(SparseVector.empty(LENGTH), 3, extra=extra).message
        return transport.allgather(message)

    with pytest.raises(MessageError, match=f"rank 1 is malformed: .* from {low} to {high}, "):
        run_ranks(local_world(2, timeout_seconds=5), program)
