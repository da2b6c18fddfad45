"""hierarchical: sums inside nodes, a sparse reduction across them; also for dense gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from collectives import NonFiniteError, SparseVector, local_world, reduce, run_ranks, select
from collectives.algorithms import Hierarchy
from collectives.algorithms.hierarchical import shard_bounds, shard_quota
from collectives.kernels import sum_by_index
from collectives.transports import LocalTransport, Traffic
from collectives.wire import HEADER_BYTES, Format
from tests.collectives.algorithms.worlds import (
    assert_nothing_is_lost,
    bits,
    by_twos,
    entries,
    integer_picks,
    ragged,
    random_picks,
    run,
    worlds,
)

DRAWN = [[0, 1, 2], [3, 4]]
ACROSS: list[dict[str, Any]] = [
    {"across": "gtopk"},
    {"across": "gtopk", "growth": 3.0},
    {"across": "oktopk"},
    {"across": "oktopk", "k_out": 12},
]


# ---- reductions of picks


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("format", [Format(), Format("packed", "int8")], ids="-".join)
@settings(max_examples=5)
@given(worlds(np.float32))
def test_nodes_of_one_rank_give_the_reduction_across_nodes(
    across: dict[str, Any], format: Format, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    options = {name: option for name, option in across.items() if name != "across"}
    if "k_out" in options:
        options["k_out"] = min(12, picks[0].length)
    nodes = [[rank] for rank in range(len(picks))]
    flat = run(across["across"], picks, k, format, **options)
    ours = run("hierarchical", picks, k, format, nodes=nodes, **{**across, **options})
    for one, other in zip(flat, ours, strict=True):
        assert [bits(vector) for vector in one] == [bits(vector) for vector in other]


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_single_node_update_is_the_largest_of_each_shard(
    size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 200, 20)
    total = sum_by_index(picks)
    bounds = shard_bounds(200, size)
    for update, _ in run("hierarchical", picks, 20):  # threads are one node
        for shard in range(size):
            first, end = bounds[shard : shard + 2]
            part, _ = select(total.index_range(first, end).to_dense(), shard_quota(20, size, shard))
            assert bits(update.index_range(first, end)) == bits(part)


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("nodes", [by_twos, ragged, lambda size: [list(range(size))]])
@settings(max_examples=6)
@given(worlds(np.float64))
def test_nothing_is_lost_for_any_division_into_nodes(
    across: dict[str, Any], nodes: Any, world: tuple[int, list[SparseVector]]
) -> None:
    k, picks = world
    across = {**across}
    if "k_out" in across:
        across["k_out"] = min(12, picks[0].length)
    outcomes = run("hierarchical", picks, k, nodes=nodes(len(picks)), **across)
    assert_nothing_is_lost(picks, outcomes, additions=4 * len(picks))
    assert len({bits(update) for update, _ in outcomes}) == 1
    most = across.get("k_out", round(across.get("growth", 1.0) * k + len(picks)))
    assert outcomes[0][0].entries <= most


@pytest.mark.parametrize("nodes", [by_twos, ragged])
@pytest.mark.parametrize("across", ["gtopk", "oktopk"])
@pytest.mark.parametrize("size", [2, 5, 8, 13])
def test_keeping_everything_is_the_dense_sum(
    size: int, across: str, nodes: Any, random: np.random.Generator
) -> None:
    picks = integer_picks(random, size, 40, 40)
    expected = np.sum([pick.to_dense() for pick in picks], axis=0)
    for update, _ in run("hierarchical", picks, 40, nodes=nodes(size), across=across):
        assert update.to_dense().tolist() == expected.tolist()


def test_dead_picks_return_to_their_owners_not_to_the_shards_owner() -> None:
    # Nodes 0 1 and 2 3, k = 2: one entry for each half of the vector.
    picks = [
        entries([(0, 1.0), (9, 1.0)], 10, np.float32),
        entries([(1, 5.0), (9, 2.0)], 10, np.float32),
        entries([(2, 6.0), (8, 1.0)], 10, np.float32),
        entries([(2, 1.0), (9, 4.0)], 10, np.float32),
    ]
    outcomes = run("hierarchical", picks, 2, nodes=[[0, 1], [2, 3]])
    assert [
        dict(zip(*map(np.ndarray.tolist, update[:2]), strict=True)) for update, _ in outcomes
    ] == [{2: 7.0, 9: 7.0}] * 4
    assert [returned.indices.tolist() for _, returned in outcomes] == [[0], [1], [8], []]


def record_messages(transport: LocalTransport) -> list[tuple[int, int]]:
    """Return a list that records (from, to) of every message a rank sends, including its views."""
    sent: list[tuple[int, int]] = []
    send_on = transport.send_on

    def send_and_record(stream: Any, message: np.ndarray, to: int) -> Any:
        sent.append((transport.rank, to))
        return send_on(stream, message, to)

    transport.send_on = send_and_record
    return sent


def test_messages_are_as_drawn(random: np.random.Generator) -> None:
    picks = random_picks(random, 5, 100, 10)
    world = local_world(5, timeout_seconds=30)
    sent = [record_messages(transport) for transport in world]
    run_ranks(world, lambda t: reduce(picks[t.rank], 10, t, "hierarchical", nodes=DRAWN))
    inside = [(0, 1), (1, 0), (2, 0), (2, 1), (3, 4), (4, 3)]
    across = [(0, 3), (3, 0), (1, 4), (4, 1)]
    back = [(to, source) for source, to in inside]
    assert sorted(message for one in sent for message in one) == sorted(inside + across + back)
    assert sent[0] == [(0, 1), (0, 3), (0, 1), (0, 2)]
    assert sent[2] == [(2, 0), (2, 1)]


@pytest.mark.parametrize("per_node", [2, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_node_sends_across_as_much_as_one_rank_would(per_node: int, count: int) -> None:
    k = 16
    pick = SparseVector(np.arange(k, dtype=np.int32), np.ones(k, np.float32), k)
    nodes = [list(range(at * per_node, (at + 1) * per_node)) for at in range(count)]
    world = local_world(per_node * count, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "hierarchical", nodes=nodes))
    rounds = count.bit_length() - 1
    for transport in world:
        across = Hierarchy(transport, nodes).across
        assert across is not None
        shard = k // per_node
        assert across.traffic == Traffic(rounds * (HEADER_BYTES + 8 * shard), rounds)
        inside = transport.traffic.sent_messages - rounds
        assert inside == 2 * (per_node - 1)


def test_nodes_default_to_the_ranks_of_each_host(random: np.random.Generator) -> None:
    picks = random_picks(random, 4, 100, 10)
    hosts = [[0, 2], [1, 3]]
    world = local_world(4, timeout_seconds=30)
    for transport in world:
        transport.neighbours = lambda rank=transport.rank: hosts[rank % 2]
    found = run_ranks(world, lambda t: reduce(picks[t.rank], 10, t, "hierarchical"))
    with_given_nodes = run("hierarchical", picks, 10, nodes=hosts)
    assert [bits(update) for update, _ in found] == [bits(update) for update, _ in with_given_nodes]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"across": "dense"}, "across must be one of gtopk, oktopk; got 'dense'"),
        ({"k_out": 3}, "algorithm 'gtopk' has no option 'k_out'; it has growth"),
        ({"across": "oktopk", "growth": 2.0}, "'oktopk' has no option 'growth'; it has k_out, reg"),
        ({"growth": 0.0}, "growth must be a number from 1 on, got 0"),
        ({"across": "oktopk", "k_out": 9}, r"k_out must lie in 1\.\.5 .* got 9"),
        ({"nodes": [[0], [0]]}, r"each of the ranks 0\.\.0 in exactly one list"),
    ],
)
def test_bad_options_are_refused_before_sending(options: dict[str, Any], text: str) -> None:
    (transport,) = local_world(1)
    with pytest.raises(ValueError, match=text):
        reduce(SparseVector.empty(5), 2, transport, "hierarchical", **options)
    assert transport.traffic == Traffic(0, 0)


# ---- reductions of dense gradients


def step(
    transport: LocalTransport,
    gradient: np.ndarray,
    residual: np.ndarray,
    k: int,
    nodes: list[list[int]],
    **options: Any,
) -> SparseVector:
    """Take the step shown in `Hierarchy`'s docstring; residual: of this rank's shard."""
    hierarchy = Hierarchy(transport, nodes)
    shard = hierarchy.scatter(gradient)
    residual += shard
    picked = SparseVector.empty(residual.size, residual.dtype)
    if residual.size:
        picked, _ = select(residual, hierarchy.shard_k(k))
    update, returned = hierarchy.reduce(picked, k, gradient.size, **options)
    residual[picked.indices] = 0
    np.add.at(residual, returned.indices, returned.values)
    return update


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("nodes", [by_twos, ragged, lambda size: [list(range(size))]])
@pytest.mark.parametrize("size", [1, 2, 5, 8, 17])
def test_updates_and_residuals_sum_to_all_gradients_over_steps(
    size: int, nodes: Any, across: dict[str, Any], random: np.random.Generator
) -> None:
    length, k = 103, 15
    world = local_world(size, timeout_seconds=30)
    where = [Hierarchy(transport, nodes(size)).shard(length) for transport in world]
    residuals = [np.zeros(shard.stop - shard.start) for shard in where]
    gradients, applied = np.zeros(length), np.zeros(length)
    for _ in range(4):
        new = np.round(8 * random.standard_normal((size, length)))
        gradients += new.sum(axis=0)
        updates = run_ranks(
            world,
            lambda t, g=new: step(t, g[t.rank].copy(), residuals[t.rank], k, nodes(size), **across),
        )
        assert len({bits(update) for update in updates}) == 1
        applied += updates[0].to_dense()
        held = np.zeros(length)
        for shard, residual in zip(where, residuals, strict=True):
            held[shard] += residual
        assert (applied + held).tolist() == gradients.tolist()
    assert applied.any()


@pytest.mark.parametrize("values", ["bf16", "int8", "int3"])
def test_rounding_errors_stay_in_the_residuals(values: str, random: np.random.Generator) -> None:
    size, length, k = 6, 90, 12
    nodes = by_twos(size)
    world = local_world(size, timeout_seconds=30)
    where = [Hierarchy(transport, nodes).shard(length) for transport in world]
    residuals = [np.zeros(shard.stop - shard.start) for shard in where]
    gradients = random.standard_normal((size, length))
    updates = run_ranks(
        world,
        lambda t: step(
            t,
            gradients[t.rank].copy(),
            residuals[t.rank],
            k,
            nodes,
            format=Format("raw", values),
        ),
    )
    held = updates[0].to_dense()
    for shard, residual in zip(where, residuals, strict=True):
        held[shard] += residual
    np.testing.assert_allclose(held, gradients.sum(axis=0), rtol=1e-12, atol=1e-13)


def test_shards_cover_the_vector_and_quotas_of_any_k_fit() -> None:
    for length in range(1, 30):
        for shards in range(1, 8):
            bounds = shard_bounds(length, shards)
            assert (bounds[0], bounds[-1]) == (0, length)
            for k in range(1, length + 1):
                parts = [shard_quota(k, shards, shard) for shard in range(shards)]
                assert sum(parts) == k
                assert all(
                    part <= end - first
                    for part, first, end in zip(parts, bounds, bounds[1:], strict=False)
                )


def test_vector_with_fewer_elements_than_ranks_per_node_is_reduced() -> None:
    world = local_world(4, timeout_seconds=30)
    nodes = [[0, 1, 2, 3]]

    def program(transport: LocalTransport) -> SparseVector:
        residual = np.zeros(1 if transport.rank < 2 else 0)
        return step(transport, np.array([1.0, -2.0]), residual, 2, nodes)

    for update in run_ranks(world, program):
        assert update.to_dense().tolist() == [4.0, -8.0]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_non_finite_value_in_a_shard_raises_on_all_ranks(size: int) -> None:
    world = local_world(size, timeout_seconds=30)
    nodes = by_twos(size)

    def program(transport: LocalTransport) -> str:
        hierarchy = Hierarchy(transport, nodes)
        shard = hierarchy.shard(40)
        values = np.full(min(1, shard.stop - shard.start), np.nan if transport.rank == 1 else 1.0)
        picked = SparseVector(np.zeros(values.size, np.int32), values, shard.stop - shard.start)
        with pytest.raises(NonFiniteError) as caught:
            hierarchy.reduce(picked, 4, 40)
        return str(caught.value)

    texts = run_ranks(world, program)
    assert len(set(texts)) == 1
    assert "rank 1 found NaN" in texts[0]
