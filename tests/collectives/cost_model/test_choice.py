"""The choice stays within its budget, fits the network, and is dense if compression cannot pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import SparseVector, reduce, run_ranks
from collectives.cost import Link
from collectives.cost_model import (
    EXACT,
    Budget,
    Calibration,
    CodingRate,
    Correction,
    Format,
    Network,
    Rates,
    Training,
    calibrate,
    choose,
    predict,
)
from collectives.cost_model.choice import LARGEST_DENSITY, fits_budget, offered
from collectives.transports import local_world

RESNET50 = 25_557_032
BLOCKS = Format("blocks")
CODING = {EXACT: CodingRate(1e-9, 1e-9), BLOCKS: CodingRate(2e-9, 2e-9)}
RATES = Rates(1.2e-9, 3.5e-8, CODING)
DENSITY_A_THOUSANDTH = Budget(density=0.001)
rank_counts = st.integers(2, 300)
latencies = st.floats(1e-6, 1e-2)


def on(ranks: int, bits_per_second: float, latency: float = 50e-6, rates: Rates = RATES):
    return Calibration(Network(ranks, Link.of(bits_per_second, latency)), rates, "made up")


def chosen(calibration: Calibration, budget: Budget = DENSITY_A_THOUSANDTH, **options):
    return choose(RESNET50, calibration, budget, options.pop("formats", (EXACT,)), **options)


@settings(max_examples=60)
@given(rank_counts, latencies, st.floats(1e6, 1e12), st.floats(1.01, 100))
def test_faster_network_speeds_up_all_candidates_and_dense_most(
    ranks, latency, bits_per_second, factor
):
    slow = {e.candidate: e.seconds for e in chosen(on(ranks, bits_per_second, latency))}
    fast = {e.candidate: e.seconds for e in chosen(on(ranks, factor * bits_per_second, latency))}
    assert slow.keys() == fast.keys()
    gains = {candidate: slow[candidate] - fast[candidate] for candidate in slow}
    assert min(gains.values()) > 0
    densest = max(gains, key=lambda candidate: gains[candidate])
    # With very many ranks, an allgather of lists is longer than the gradient itself.
    assert densest.algorithm == "dense" or 2 * ranks * 0.001 > 1


@settings(max_examples=60)
@given(rank_counts, st.floats(1e-5, 0.5))
def test_dense_is_chosen_on_an_infinitely_fast_network(ranks, density):
    best, *_ = chosen(on(ranks, float("inf"), 0.0), Budget(density=density))
    assert best.candidate.algorithm == "dense"


@pytest.mark.parametrize("ranks", [2, 4, 32, 256])
def test_sparse_is_chosen_on_a_slow_network(ranks):
    best, *others = chosen(on(ranks, 1e8))
    assert best.candidate.algorithm != "dense"
    assert best.candidate.density == 0.001
    assert any(other.candidate.algorithm == "dense" for other in others)


def test_allgather_is_chosen_for_few_ranks_and_gtopk_or_oktopk_for_many():
    assert chosen(on(2, 1e9))[0].candidate.algorithm == "topk-allgather"
    assert chosen(on(128, 1e9, latency=1e-3))[0].candidate.algorithm == "gtopk"
    assert chosen(on(128, 1e8, latency=1e-5))[0].candidate.algorithm == "oktopk"


def test_hierarchical_is_chosen_when_ranks_share_a_nodes_link():
    network = Network(64, Link.of(1e9, 5e-5), 8, Link.of(1e11, 5e-6))
    best = chosen(Calibration(network, RATES, "made up"))[0]
    assert best.candidate.algorithm == "hierarchical"
    assert "hierarchical" not in {each.candidate.algorithm for each in chosen(on(64, 1e9))}


def test_shorter_training_chooses_wider_updates():
    """With fewer steps left, the choice never changes from wider to narrower updates."""
    updated = [
        chosen(on(128, 1e9, latency=1e-3), training=Training(steps, 1.0))[0].updated
        for steps in (1e9, 1e5, 1e4, 1e3, 100, 10)
    ]
    assert updated == sorted(updated)
    assert updated[0] == 2 * round(0.001 * RESNET50)  # costs no extra bytes
    assert updated[-1] > 25 * updated[0]


def test_wider_updates_are_offered_with_more_ranks():
    """Two ranks pick at most 2 k entries in total, and an allgather updates all of them."""
    for ranks, expected in ((2, {1.0}), (3, {1.0, 2.0}), (8, {1.0, 2.0, 4.0})):
        found = [each.candidate for each in chosen(on(ranks, 1e9))]
        assert {each.widening for each in found if each.algorithm == "gtopk"} == expected
        assert {each.widening for each in found if each.algorithm == "topk-allgather"} == {1.0}


@pytest.mark.parametrize("ranks", [8, 64])
def test_updates_twice_as_wide_send_no_more_bytes(ranks):
    sent = {
        each.candidate.widening: each.sent.bytes
        for each in chosen(on(ranks, 1e9))
        if each.candidate.algorithm == "gtopk"
    }
    assert sent[1.0] == sent[2.0] < sent[4.0]


def test_dense_is_chosen_for_one_rank():
    assert chosen(on(1, 1e9))[0].candidate.algorithm == "dense"


def test_packed_format_is_chosen_on_a_slow_link_and_not_on_a_fast_one():
    formats = (EXACT, BLOCKS)
    assert chosen(on(8, 1e8), formats=formats)[0].candidate.format == BLOCKS
    fastest = chosen(on(8, 1e11, rates=RATES._replace(select_seconds=0.0)), formats=formats)
    order = [
        each.candidate.format
        for each in fastest
        if (each.candidate.algorithm, each.candidate.widening) == ("gtopk", 1.0)
    ]
    assert order == [EXACT, BLOCKS]


def test_dense_is_kept_when_sparse_gains_less_than_the_models_error():
    """Dense updates every coordinate, so it is kept unless sparse is clearly faster."""
    network = Network(2, Link.of(1e9, 0.0))
    dense = RESNET50 * 4 * 8e-9
    for gain, algorithm in ((0.02, "dense"), (0.2, "topk-allgather")):
        rates = Rates((1 - gain) * dense / RESNET50, 0.0, {EXACT: CodingRate(0.0, 0.0)})
        best, *_ = chosen(Calibration(network, rates, ""), Budget(density=1e-6))
        assert best.candidate.algorithm == algorithm


@settings(max_examples=60)
@given(rank_counts, st.floats(1e7, 1e11), st.floats(1e3, 1e9))
def test_every_candidate_keeps_the_byte_budget_and_uses_it_up(ranks, bits_per_second, budget_bytes):
    budget = Budget(bytes_per_step=budget_bytes)
    try:
        found = chosen(on(ranks, bits_per_second), budget)
    except ValueError:
        assert budget_bytes < 100 * ranks
        return
    assert all(each.sent.most_bytes <= budget_bytes for each in found)
    # ... and uses all of it: one more entry would not fit.
    for each in found:
        if each.candidate.algorithm == "gtopk" and each.candidate.density < LARGEST_DENSITY:
            rounds = each.sent.most_bytes / (8 * each.candidate.selected(RESNET50))
            assert budget_bytes - each.sent.most_bytes < 8 * (rounds + 1) + 9


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("budget_bytes", [2_000, 10_000, 30_000])
def test_bytes_counted_by_the_transport_keep_the_byte_budget(size, budget_bytes):
    length = 20_000
    found = choose(length, on(size, 1e8), Budget(bytes_per_step=budget_bytes), (EXACT,))
    assert {each.candidate.algorithm for each in found} >= {"gtopk", "topk-allgather"}
    for each in found:
        if each.candidate.algorithm == "dense":
            continue
        k = each.candidate.selected(length)
        world = local_world(size, 30)
        run_ranks(
            world,
            lambda t, k=k, name=each.candidate.algorithm: reduce(
                SparseVector(
                    np.arange(t.rank, t.rank + k, dtype=np.int32), np.ones(k, np.float32), length
                ),
                k,
                t,
                name,
            ),
        )
        assert max(t.traffic.sent_bytes for t in world) <= budget_bytes


def test_byte_budget_below_one_entry_is_refused_with_the_minimum():
    with pytest.raises(ValueError, match=r"bytes_per_step must be at least \d+ on 8 ranks .* 10"):
        chosen(on(8, 1e9), Budget(bytes_per_step=10))


def test_dense_is_chosen_when_its_bytes_fit_the_budget():
    assert chosen(on(8, 1e9), Budget(bytes_per_step=1e9))[0].candidate.algorithm == "dense"


@settings(max_examples=60)
@given(rank_counts, st.floats(1e7, 1e11), st.floats(1e-3, 10))
def test_largest_density_within_the_time_budget_is_chosen(ranks, bits_per_second, seconds):
    here, budget = on(ranks, bits_per_second), Budget(seconds=seconds)
    best, *others = chosen(here, budget)
    assert any(each.candidate.algorithm == "dense" for each in (best, *others))
    if best.candidate.algorithm == "dense":
        kept = [each for each in others if fits_budget(each, budget)]
        assert fits_budget(best, budget) or all(each.seconds >= best.seconds for each in kept)
    elif fits_budget(best, budget) and best.candidate.density < LARGEST_DENSITY:
        # One more entry exceeds the budget; it may also start another message.
        more = (best.candidate.selected(RESNET50) + 1) / RESNET50
        denser = replace(best.candidate, density=more)
        assert not fits_budget(predict(denser, RESNET50, here.network, here.rates), budget)


def test_shortest_candidate_is_chosen_when_none_fits_the_time_budget():
    best, *others = chosen(on(32, 1e8), Budget(seconds=1e-6))
    assert best.seconds == min(each.seconds for each in (best, *others))


def test_correction_changes_only_its_algorithms_prediction():
    calibration = on(16, 1e9)
    before = {e.candidate.algorithm: e for e in chosen(calibration)}
    after = {
        e.candidate.algorithm: e
        for e in chosen(calibration, corrections={"gtopk": Correction(2.0, 3.0, 5.0)})
    }
    parts = {"select": 2.0, "merge": 3.0, "code": 3.0, "communicate": 5.0}
    for part, factor in parts.items():
        once, times = (getattr(all["gtopk"], f"{part}_seconds") for all in (before, after))
        assert times == pytest.approx(factor * once)
    assert after["dense"] == before["dense"]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_every_rank_chooses_the_same_candidates(size, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def program(transport):
        return choose(RESNET50, calibrate(transport), Budget(density=0.01), (EXACT,))

    of_all_ranks = run_ranks(local_world(size, 30), program)
    assert of_all_ranks == [of_all_ranks[0]] * size


def test_hierarchical_is_not_offered_for_nodes_of_unequal_sizes():
    """The number of shards is that of the smallest node's ranks."""
    link = Link.of(1e9, 1e-4)
    for ranks, is_offered in ((8, True), (7, False), (4, False)):
        assert ("hierarchical" in offered(Network(ranks, link, 4, link))) == is_offered
