"""The comparison is consistent on both sides of its break-even."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict
from gtopk.planning.comparison import Cluster, Comparison, compare


def ask(
    bits_per_second: float, ranks: int = 32, length: int = 25_557_032, backward: float = 0.0
) -> Comparison:
    network = Network(ranks, Link.of(bits_per_second, 50e-6))
    return compare(Cluster(length, network, 0.001, backward), DEFAULT_RATES)


@settings(max_examples=3, deadline=None)
@given(
    st.integers(2, 200),
    st.integers(10**4, 10**9),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.floats(1e6, 1e12),
)
def test_compression_pays_only_below_the_break_even(ranks, length, backward, bits_per_second):
    edge = ask(bits_per_second, ranks, length, backward).break_even.bits_per_second
    if edge is None:
        assert not ask(1e3, ranks, length, backward).pays
    elif not math.isinf(edge):
        assert ask(0.99 * edge, ranks, length, backward).pays
        assert not ask(1.01 * edge, ranks, length, backward).pays


def test_break_even_bounds_count_all_time_of_dense():
    """The part hidden behind backward counts as well."""
    edge = ask(1e9, backward=0.5).break_even[:3]
    dense = {bits: ask(bits, backward=0.5).dense.seconds for bits in edge}
    sparse = {bits: ask(bits, backward=0.5).cheapest_sparse.seconds for bits in edge}
    for bits, factor in zip(edge, (1.0, 1 / 1.2, 1.2), strict=True):
        assert factor * dense[bits] == pytest.approx(0.5 + sparse[bits], rel=1e-6)


def test_speedup_counts_backward_and_exchange_together():
    comparison = ask(1e9, backward=0.1)
    dense, gtopk = comparison.dense, comparison.sparse[2]
    expected = (0.1 + dense.seconds - 0.1) / (0.1 + gtopk.seconds)
    assert comparison.speedup(gtopk) == pytest.approx(expected)
    assert comparison.speedup(dense) == 1


def test_equal_bytes_methods_send_no_more_than_gtopk():
    comparison = ask(1e9)
    gtopk = next(each for each in comparison.sparse if each.candidate.algorithm == "gtopk")
    of = {(e.candidate.algorithm, e.candidate.widening): e for e in comparison.equal_bytes}
    wider = {("gtopk", 2.0), ("gtopk", 4.0), ("oktopk", 4.0)}
    assert of.keys() == {("gtopk", 1.0), ("topk-allgather", 1.0), ("oktopk", 1.0)} | wider
    assert all(each.sent.most_bytes <= gtopk.sent.most_bytes for each in of.values())
    selected = of["gtopk", 1.0].candidate.selected(25_557_032)
    assert selected == gtopk.candidate.selected(25_557_032)
    assert of["gtopk", 4.0].candidate.selected(25_557_032) < selected


def test_several_buckets_cost_two_agreements():
    link = Link.of(1e9, 10e-3)
    measured = Network(4, link, agreement_seconds=7e-3)
    for network, each in ((Network(4, link), 20e-3), (measured, 7e-3)):
        for buckets, agreements in ((1, 1), (2, 2), (5, 2)):
            cluster = Cluster(10**6, network, 0.001, buckets=buckets, dense_buckets=2)
            gtopk, dense = Candidate("gtopk", 0.001), Candidate("dense")
            alone = predict(gtopk, 10**6 // buckets, network, DEFAULT_RATES).times(buckets)
            found = cluster.reduced(gtopk, DEFAULT_RATES)
            assert found.seconds == pytest.approx(alone.seconds + agreements * each)
            assert found.communicate_seconds == alone.communicate_seconds
            halves = predict(dense, 10**6 // 2, network, DEFAULT_RATES).times(2)
            found_dense = cluster.reduced(dense, DEFAULT_RATES)
            assert found_dense.seconds == pytest.approx(halves.seconds + 2 * each)


def test_agreement_within_one_node_uses_its_own_links():
    network = Network(8, Link.of(1e9, 10e-3), 8, Link.of(1e10, 5e-6))
    assert network.expected_agreement_seconds == pytest.approx(3 * 5e-6)
    assert network._replace(ranks_per_node=4).expected_agreement_seconds == pytest.approx(3 * 10e-3)


@pytest.mark.parametrize("ranks", [1, 4])
def test_break_even_on_one_node_is_of_its_own_link(ranks):
    """No message leaves the node, so other links do not matter."""
    between, within = Link.of(1e6, 1.0), Link.of(2e11, 5e-6)
    network = Network(ranks, between, ranks, within, native_bytes=0)
    same_link = Network(ranks, within, ranks, native_bytes=0)
    found, expected = (
        compare(Cluster(10**6, n, 0.001), DEFAULT_RATES) for n in (network, same_link)
    )
    assert found.break_even == expected.break_even
    edge = found.break_even.bits_per_second
    if ranks == 1:
        assert edge is None
        return
    for factor, pays in ((0.99, True), (1.01, False)):
        here = found.cluster.on(Link.of(factor * edge, within.latency_seconds))
        assert compare(here, DEFAULT_RATES).pays == pays


def test_agreement_time_scales_with_link_latency():
    here = Cluster(10**6, Network(4, Link.of(1e9, 10e-3), agreement_seconds=7e-3), 0.001)
    there = here.on(Link.of(1e8, 20e-3))
    assert there.network.agreement_seconds == pytest.approx(14e-3)
    assert here.on(Link.of(1e8, 10e-3)).network.agreement_seconds == pytest.approx(7e-3)


@given(st.floats(-0.5e-9, 5e-9), st.floats(1e6, 1e12))
def test_allreduce_on_another_link_is_the_faster_of_two_estimates(beyond, bits_per_second):
    """The library's loss stays the same in seconds per byte, or in proportion, as is faster."""
    here, there = Link.of(1e10, 50e-6), Link.of(bits_per_second, 50e-6)
    allreduce = Link(here.latency_seconds, here.seconds_per_byte + beyond)
    cluster = Cluster(10**6, Network(4, here, allreduce=allreduce), 0.001)
    found = cluster.on(there).network.allreduce
    assert found is not None
    in_proportion = there.seconds_per_byte * (allreduce.seconds_per_byte / here.seconds_per_byte)
    if beyond <= 0 or bits_per_second >= 1e10:
        assert found.seconds_per_byte == pytest.approx(in_proportion)
    else:
        assert found.seconds_per_byte == pytest.approx(there.seconds_per_byte + beyond)
    assert cluster.on(here).network.allreduce == pytest.approx(allreduce)
