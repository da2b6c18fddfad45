"""The predicted messages of an algorithm are those that are counted."""

from __future__ import annotations

import math
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import SparseVector, reduce, run_ranks, wire
from collectives.algorithms import ALGORITHMS, Regions
from collectives.cost import Link
from collectives.cost_model import (
    DEFAULT_RATES,
    EXACT,
    Candidate,
    CodingRate,
    Format,
    Network,
    Rates,
    predict,
)
from collectives.cost_model.prediction import most_bytes
from collectives.cost_model.schedules import (
    GATHER_SENDS,
    SCHEDULES,
    SEARCH_SENDS,
    Order,
    leaving,
    leaving_by_shift,
)
from collectives.transports import local_world, reductions
from collectives.transports.reductions import LONG_BYTES

K = 24
LINK = Link(1e-3, 1e-6)
BLOCK = 1 << 16
PACKED = Format("packed", "int8")
# Shards, of which `reduce` knows nothing, have tests of their own: algorithms/test_shards.py.
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
# The content of their messages is known, whatever the ranks pick.
FLAT = ("dense", "topk-allgather", "gtopk-tree", "gtopk")


def length_for(ranks: int) -> int:
    """Return a length that all ranks divide: the parts of an allreduce are equal."""
    return ranks * 360


def own_picks(rank: int, ranks: int) -> SparseVector:
    """Return K entries that no other rank picks, spread evenly: every list is full."""
    length = length_for(ranks)
    indices = (np.arange(K) * (length // K) + rank).astype(np.int32)
    return SparseVector(indices, np.full(K, 1.0 + rank, np.float32), length)


def same_picks(rank: int, ranks: int) -> SparseVector:
    """Return K entries that every rank picks."""
    indices = np.arange(0, 3 * K, 3, dtype=np.int32)
    return SparseVector(indices, np.ones(K, np.float32), length_for(ranks))


def predicted(algorithm: str, ranks: int, network: Network):
    length = length_for(ranks)
    return predict(Candidate(algorithm, K / length), length, network, DEFAULT_RATES)


@pytest.mark.parametrize("algorithm", FLAT)
@pytest.mark.parametrize("picks", [own_picks, same_picks])
@pytest.mark.parametrize("ranks", range(1, 18))
def test_predicted_messages_and_bytes_equal_the_transports_counts(algorithm, picks, ranks):
    world = local_world(ranks, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(picks(t.rank, ranks), K, t, algorithm))
    sent = predicted(algorithm, ranks, Network(ranks, LINK)).sent
    assert sent.messages * ranks == pytest.approx(sum(t.traffic.sent_messages for t in world))
    assert sent.bytes * ranks == pytest.approx(sum(t.traffic.sent_bytes for t in world))
    assert max(t.traffic.sent_bytes for t in world) <= sent.most_bytes + 1e-6


@pytest.mark.parametrize("ranks", range(1, 18))
def test_predicted_oktopk_bytes_equal_the_counts_with_kept_boundaries(ranks):
    world = local_world(ranks, timeout_seconds=30)

    def program(transport):
        regions = Regions()
        for _ in range(2):
            transport.traffic.read_and_reset()
            reduce(own_picks(transport.rank, ranks), K, transport, "oktopk", regions=regions)

    run_ranks(world, program)
    sent = predicted("oktopk", ranks, Network(ranks, LINK)).sent
    assert sent.messages * ranks == pytest.approx(sum(t.traffic.sent_messages for t in world))
    # A remainder of the division by P is rounded up for every rank.
    counted = sum(t.traffic.sent_bytes for t in world)
    assert counted <= sent.bytes * ranks + 1e-6
    assert sent.bytes * ranks <= counted + 2 * 8 * ranks * ranks


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
def test_predicted_hierarchical_messages_and_bytes_equal_the_counts(nodes, ranks_per_node):
    ranks = nodes * ranks_per_node
    world = local_world(ranks, timeout_seconds=30)
    groups = np.arange(ranks).reshape(nodes, ranks_per_node).tolist()
    run_ranks(
        world,
        lambda t: reduce(own_picks(t.rank, ranks), K, t, "hierarchical", nodes=groups),
    )
    network = Network(ranks, LINK, ranks_per_node)
    sent = predicted("hierarchical", ranks, network).sent
    assert sent.messages * ranks == pytest.approx(sum(t.traffic.sent_messages for t in world))
    assert sent.bytes * ranks == pytest.approx(sum(t.traffic.sent_bytes for t in world), rel=0.02)


def every_other_block(rank: int, entries: int, length: int) -> SparseVector:
    """Return the worst picks for blocks, at different indices on each rank."""
    picks = np.arange(1, 2 * entries, 2) * BLOCK + rank
    return as_vector(picks, rank, length)


def uniform(rank: int, entries: int, length: int) -> SparseVector:
    random = np.random.default_rng(rank)
    return as_vector(np.sort(random.choice(length, entries, replace=False)), rank, length)


def at_the_end(rank: int, entries: int, length: int) -> SparseVector:
    """Return picks in the last rank's region and shard."""
    return as_vector(np.arange(length - entries, length), rank, length)


def first_at_the_end(rank: int, entries: int, length: int) -> SparseVector:
    """Return picks that are spread on every rank but the first."""
    return (at_the_end if rank == 0 else uniform)(rank, entries, length)


def as_vector(indices: np.ndarray, rank: int, length: int) -> SparseVector:
    values = np.random.default_rng(rank).standard_normal(indices.size).astype(np.float32)
    return SparseVector(indices.astype(np.int32), values, length)


def run_on_nodes(
    world, algorithm: str, ranks_per_node: int, picks, k: int, format: Format, **options
) -> None:
    """Reduce these picks, a hierarchy's on nodes of so many ranks."""
    if algorithm == "hierarchical":
        options |= {"nodes": np.arange(len(world)).reshape(-1, ranks_per_node).tolist()}
    run_ranks(world, lambda t: reduce(picks(t.rank), k, t, algorithm, format=format, **options))


@pytest.mark.parametrize("format", [EXACT, Format("blocks"), Format("packed", "int8")])
@pytest.mark.parametrize("ranks_per_node", [2, 4, 12])
@pytest.mark.parametrize("growth", [1.0, 2.0, 4.0])
def test_hierarchical_bytes_assume_raw_exact_lists_inside_a_node(format, ranks_per_node, growth):
    ranks, length, k = 12, 1_000_000, 1000
    world = local_world(ranks, timeout_seconds=30)
    picks = partial(uniform, entries=k, length=length)
    run_on_nodes(world, "hierarchical", ranks_per_node, picks, k, format, growth=growth)
    network = Network(ranks, LINK, ranks_per_node)
    candidate = Candidate("hierarchical", k / length, format, growth)
    sent = predict(candidate, length, network, DEFAULT_RATES).sent
    assert sent.bytes * ranks == pytest.approx(sum(t.traffic.sent_bytes for t in world), rel=0.01)
    assert max(t.traffic.sent_bytes for t in world) <= sent.most_bytes


@pytest.mark.parametrize("format", [EXACT, Format("blocks"), PACKED], ids=str)
def test_oktopk_bytes_are_those_of_lists_of_its_regions_in_any_format(format):
    ranks, length, k = 8, 2_000_000, 4000
    world = local_world(ranks, timeout_seconds=30)

    def program(transport):
        regions, picks = Regions(), uniform(transport.rank, k, length)
        for _ in range(2):
            transport.traffic.read_and_reset()
            reduce(picks, k, transport, "oktopk", format=format, regions=regions)

    run_ranks(world, program)
    candidate = Candidate("oktopk", k / length, format)
    sent = predict(candidate, length, Network(ranks, LINK), DEFAULT_RATES).sent
    assert sent.bytes * ranks == pytest.approx(sum(t.traffic.sent_bytes for t in world), rel=0.01)


@pytest.mark.parametrize("measured", [(EXACT, PACKED), (PACKED,)])
def test_exact_lists_use_the_exact_coding_rate_if_measured(measured):
    rates = Rates(0.0, 0.0, {EXACT: CodingRate(1.0, 1.0), PACKED: CodingRate(10.0, 10.0)})
    rates = rates._replace(coding={format: rates.coding[format] for format in measured})
    one_node, candidate = Network(4, LINK, 4), Candidate("hierarchical", 0.1, PACKED)
    # Three parts of ten to the others, and three of ten back to them.
    each = 1.0 if EXACT in measured else 10.0
    assert predict(candidate, 400, one_node, rates).code_seconds == 2 * 2 * 3 * 10 * each


@pytest.mark.parametrize("format", [Format("blocks"), Format("blocks", "int8"), PACKED], ids=str)
@pytest.mark.parametrize("picks", [every_other_block, uniform, at_the_end, first_at_the_end])
@pytest.mark.parametrize("ranks", [2, 6, 8])
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"dense", "gtopk-tree"}))
def test_sent_bytes_are_at_most_the_predicted_maximum(algorithm, ranks, picks, format):
    k, length = 200, 500 * BLOCK
    world, ranks_per_node = local_world(ranks, timeout_seconds=30), ranks // 2
    mine = partial(picks, entries=k, length=length)
    run_on_nodes(world, algorithm, ranks_per_node, mine, k, format)
    network = Network(ranks, LINK, ranks_per_node)
    candidate = Candidate(algorithm, k / length, format)
    sent = predict(candidate, length, network, DEFAULT_RATES).sent
    assert max(t.traffic.sent_bytes for t in world) <= sent.most_bytes


def test_oktopk_maximum_includes_another_threshold_round():
    """A region has more than 64 of the 252 wanted entries, which takes another round."""
    ranks, length, k = 12, 1_000_000, 63
    world, mine = local_world(ranks, timeout_seconds=30), partial(uniform, entries=k, length=length)
    run_on_nodes(world, "oktopk", 1, mine, k, EXACT, k_out=4 * k)
    candidate = Candidate("oktopk", k / length, widening=4.0)
    most = most_bytes(candidate, length, Network(ranks, LINK))
    assert max(t.traffic.sent_bytes for t in world) <= most


def test_hierarchical_maximum_includes_alive_bits_of_a_large_node():
    ranks, length, k = 32, 64_000, 960
    world = local_world(ranks, timeout_seconds=30)

    def picks(rank: int) -> SparseVector:
        """Return picks in the last shard, but of its owner."""
        if rank == ranks - 1:
            return as_vector(np.arange(k), rank, length)
        return at_the_end(rank, k, length)

    run_on_nodes(world, "hierarchical", ranks, picks, k, EXACT)
    candidate = Candidate("hierarchical", k / length)
    most = most_bytes(candidate, length, Network(ranks, LINK, ranks))
    assert 0.9 * most < max(t.traffic.sent_bytes for t in world) <= most


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 11, 16])
@pytest.mark.parametrize("growth", [1.0, 1.5, 2.0, 4.0, 8.0])
def test_growing_lists_are_predicted_with_their_growth(ranks, growth):
    """A merge at most doubles a list, for any growth."""
    world = local_world(ranks, timeout_seconds=30)
    updates = run_ranks(
        world, lambda t: reduce(own_picks(t.rank, ranks), K, t, "gtopk", growth=growth)[0]
    )
    length = length_for(ranks)
    candidate = Candidate("gtopk", K / length, widening=growth)
    found = predict(candidate, length, Network(ranks, LINK), DEFAULT_RATES)
    counted = sum(t.traffic.sent_bytes for t in world)
    assert found.sent.bytes * ranks == pytest.approx(counted)
    assert max(t.traffic.sent_bytes for t in world) <= found.sent.most_bytes
    # Picks that are independent share some places; these share none.
    assert 0.9 * updates[0].entries <= found.updated <= updates[0].entries


@pytest.mark.parametrize("ranks", [3, 8])
def test_oktopk_update_is_predicted_with_at_most_the_vectors_entries(ranks):
    whole_vector, more = (
        predict(Candidate("oktopk", 0.5, widening=wide), 4000, Network(ranks, LINK), DEFAULT_RATES)
        for wide in (2.0, 4.0)
    )
    assert more.sent == whole_vector.sent
    assert more.seconds == whole_vector.seconds


@pytest.mark.parametrize("algorithm", FLAT)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 11, 16])
def test_predicted_seconds_equal_those_of_a_virtual_network(virtual, algorithm, ranks):
    world = virtual(ranks, LINK)
    run_ranks(world.world, lambda t: reduce(own_picks(t.rank, ranks), K, t, algorithm))
    communicate = predicted(algorithm, ranks, Network(ranks, LINK)).communicate_seconds
    # If not all ranks take part in a round, messages of the next may be in flight already.
    partial = algorithm == "gtopk-tree" or (algorithm == "gtopk" and ranks & (ranks - 1))
    slack = 2 if partial else 1 + 1e-9
    assert max(world.seconds) <= communicate * (1 + 1e-9)
    assert communicate <= max(world.seconds) * slack


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("block_bytes", [LONG_BYTES // 2, LONG_BYTES, 5 * LONG_BYTES])
def test_dense_prediction_includes_acknowledgements_of_long_messages(virtual, ranks, block_bytes):
    """If two pieces take longer than an acknowledgement and a piece in flight: a latency each."""
    length = ranks * block_bytes // 4
    link = Link(1e-2, 1e-7)
    world = virtual(ranks, link)
    with mock.patch.object(reductions, "PIECE_BYTES", 2 * LONG_BYTES):
        run_ranks(world.world, lambda t: t.allreduce(np.zeros(length, np.float32)))
    found = predict(Candidate("dense"), length, Network(ranks, link), DEFAULT_RATES)
    assert found.communicate_seconds == pytest.approx(max(world.seconds), rel=1e-3)  # checksums
    distances = [1 << number for number in range((ranks - 1).bit_length())]
    blocks = [min(distance, ranks - distance) for distance in distances]
    answered = sum(count * block_bytes >= LONG_BYTES for count in blocks)
    assert found.rounds == 2 * (len(distances) + answered)


def test_hierarchical_latency_counts_picks_and_results_of_a_node():
    """All members send their parts at once, and get the results once these have arrived."""
    ranks, alpha = 8, Link(1e-3, 0.0)
    network = Network(ranks, Link(1.0, 0.0), ranks, alpha)
    assert predicted("hierarchical", ranks, network).latency_seconds == pytest.approx(2e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 11])
def test_oktopk_parts_sent_together_take_one_latency(virtual, ranks):
    alpha = Link(1e-3, 0.0)
    world = virtual(ranks, alpha)
    regions = [Regions() for _ in range(ranks)]

    def program(transport) -> float:
        begun = world.seconds[transport.rank]
        picks = own_picks(transport.rank, ranks)
        reduce(picks, K, transport, "oktopk", regions=regions[transport.rank])
        return world.seconds[transport.rank] - begun

    run_ranks(world.world, program)  # computes the boundaries, which takes further messages
    world.seconds[:] = [max(world.seconds)] * ranks
    assert (
        run_ranks(world.world, program)
        == [pytest.approx(predicted("oktopk", ranks, Network(ranks, alpha)).latency_seconds)]
        * ranks
    )


@pytest.mark.parametrize("algorithm", ["dense", "topk-allgather", "gtopk"])
@pytest.mark.parametrize("burst_bytes", [100, 300, 10_000])
def test_bytes_within_the_token_bucket_take_no_time(virtual, algorithm, burst_bytes):
    ranks, link = 8, Link(1e-4, 1e-6, burst_bytes)  # in a latency a bucket gets 100 bytes
    world = virtual(ranks, link)
    run_ranks(world.world, lambda t: reduce(own_picks(t.rank, ranks), K, t, algorithm))
    network, at_once = Network(ranks, link), Rates(0.0, 0.0, {EXACT: CodingRate(0.0, 0.0)})
    candidate, length = Candidate(algorithm, K / length_for(ranks)), length_for(ranks)
    found = predict(candidate, length, network, at_once).communicate_seconds
    assert found == pytest.approx(max(world.seconds), rel=1e-6)


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_messages_within_a_node_use_its_own_link(virtual, ranks_per_node):
    within, ranks = Link(1e-6, 1e-9), 8
    world = virtual(ranks, LINK, within, ranks_per_node)
    run_ranks(world.world, lambda t: reduce(own_picks(t.rank, ranks), K, t, "gtopk"))
    network = Network(ranks, LINK, ranks_per_node, within)
    found = predicted("gtopk", ranks, network).communicate_seconds
    alone = predicted("gtopk", ranks // ranks_per_node, Network(8 // ranks_per_node, LINK))
    # The virtual world's ranks have a link each; the model's ranks of a node share one.
    assert max(world.seconds) < found
    assert found > alone.communicate_seconds


@every_algorithm
def test_single_rank_is_predicted_to_send_nothing(algorithm):
    found = predicted(algorithm, 1, Network(1, LINK))
    assert found.communicate_seconds == 0
    assert found.sent == (0, 0, 0)


@every_algorithm
@settings(max_examples=30)
@given(st.integers(1, 300), st.floats(0, 1), st.floats(0, 1e-3))
def test_predicted_latency_and_bandwidth_times_add_up(algorithm, ranks, alpha, beta):
    def seconds(link: Link) -> float:
        return predicted(algorithm, ranks, Network(ranks, link)).communicate_seconds

    together = seconds(Link(alpha, beta))
    assert together == pytest.approx(seconds(Link(alpha, 0)) + seconds(Link(0, beta)))


def test_predicted_seconds_at_32_ranks_equal_the_papers_formulas():
    # Shi et al. 2019, table I, an entry counted as two words of four bytes; log2(32) = 5.
    # Headers, alive bits and sizes, which the paper does not count, are under a hundredth.
    alpha, beta, n, k = 0.436e-3, 3.6e-8, 25_557_032, 25_557
    link = Link(alpha, beta / 4)

    def seconds(algorithm: str) -> float:
        network = Network(32, link)
        return predict(Candidate(algorithm, 0.001), n, network, DEFAULT_RATES).communicate_seconds

    dense = 62 / 32 * n * beta
    # Their dense is a ring, 62 alpha; ours has the fewest messages possible, all of them long here,
    # and acknowledged.
    assert seconds("dense") == pytest.approx(20 * alpha + dense)
    tree = 10 * alpha + 4 * 5 * k * beta
    assert seconds("topk-allgather") == pytest.approx(5 * alpha + 2 * 31 * k * beta, rel=0.01)
    assert seconds("gtopk-tree") == pytest.approx(tree, rel=0.01)
    assert seconds("gtopk") == pytest.approx(5 * alpha + 2 * 5 * k * beta, rel=0.01)


@settings(max_examples=100)
@given(st.integers(1, 60), st.integers(0, 80), st.integers(1, 20))
def test_leaving_by_shift_equals_the_counted_messages(ranks, distance, ranks_per_node):
    distance %= ranks
    nodes = -(-ranks // ranks_per_node)
    ranks = nodes * ranks_per_node  # full nodes
    everyone = np.arange(ranks)
    counted = leaving(everyone, (everyone + distance) % ranks, ranks_per_node)
    assert leaving_by_shift(distance, ranks, ranks_per_node) == counted


@every_algorithm
def test_short_lists_take_the_measured_per_call_overhead(algorithm):
    calls = Rates(
        0.0,
        0.0,
        {EXACT: CodingRate(0.0, 0.0)},
        swap_seconds=1.0,
        list_seconds=0.1,
        send_seconds=0.01,
    )
    candidate = Candidate(algorithm, 1e-4)

    def seconds(ranks: int, cores: float) -> float:
        network = Network(ranks, LINK, ranks_per_core=max(1.0, ranks / cores))
        return predict(candidate, 10**5, network, calls).merge_seconds

    expected = {"dense": 0.0, "topk-allgather": 1.7, "gtopk-tree": 3.3}
    # Parts, two rounds of the threshold and the gather, each of 7 lists; 10 entries are one round.
    expected["oktopk"] = 3 * 0.7 + 0.01 * (7 + SEARCH_SENDS + GATHER_SENDS)
    assert seconds(8, math.inf) == pytest.approx(expected.get(algorithm, 3.0))
    assert seconds(8, 2) == seconds(8, math.inf)
    if algorithm == "gtopk":  # folded in, two rounds, and back
        assert seconds(5, math.inf) == pytest.approx(1.0 + 2.0 + 0.1)


@pytest.mark.parametrize(("ranks", "turns"), [(2, 1), (3, 2), (4, 2), (6, 3), (8, 4)])
def test_coding_time_grows_with_ranks_per_core(ranks, turns):
    coding = Rates(0.0, 1.0, {EXACT: CodingRate(1.0, 1.0)}, sum_seconds=1.0)

    def seconds(cores: float) -> float:
        candidate = Candidate("topk-allgather", 1e-3)
        network = Network(ranks, LINK, ranks_per_core=max(1.0, ranks / cores))
        found = predict(candidate, 10**5, network, coding)
        return found.code_seconds + found.merge_seconds

    assert seconds(2) == pytest.approx(turns * seconds(math.inf))


@pytest.mark.parametrize("algorithm", ["dense", "gtopk"])
def test_selection_time_grows_with_ranks_per_core(algorithm):
    rates = Rates(1.0, 0.0, {EXACT: CodingRate(0.0, 0.0)}, copy_seconds=1.0)

    def seconds(ranks_per_core: float) -> float:
        network = Network(4, LINK, ranks_per_core=ranks_per_core)
        return predict(Candidate(algorithm, 1e-3), 10**5, network, rates).select_seconds

    assert seconds(1.0) == 10**5
    assert seconds(1.5) == 1.5 * 10**5


@pytest.mark.parametrize(("ranks", "passes"), [(2, 1), (3, 2), (8, 3)])
def test_merge_time_counts_sums_of_pairs_of_lists(ranks, passes):
    sums = Rates(0.0, 0.0, {EXACT: CodingRate(0.0, 0.0)}, sum_seconds=1.0)

    def seconds(algorithm: str, network: Network) -> float:
        return predict(Candidate(algorithm, 1e-3), 10**5, network, sums).merge_seconds

    assert seconds("topk-allgather", Network(ranks, LINK)) == ranks * 100 * passes
    # The picks of a region, and the blocks of the update.
    block = -(-100 // ranks)
    assert seconds("oktopk", Network(ranks, LINK)) == (100 + ranks * block) * passes
    # The picks of a shard, as many, inside the only node.
    inside = seconds("hierarchical", Network(ranks, LINK, ranks))
    assert inside == pytest.approx(ranks * block * passes)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["topk-allgather", "gtopk", "oktopk"])
def test_decoded_lists_are_as_many_as_in_the_schedule(algorithm, ranks, monkeypatch):
    decoded, decode = [], wire.decode

    def counted(*arguments, **options):
        decoded.append(None)  # atomic: the ranks are threads
        return decode(*arguments, **options)

    def program(transport):
        options = {"regions": Regions()} if algorithm == "oktopk" else {}
        reduce(own_picks(transport.rank, ranks), K, transport, algorithm, **options)  # boundaries
        transport.barrier()
        if transport.rank == 0:
            decoded.clear()
        transport.barrier()
        reduce(own_picks(transport.rank, ranks), K, transport, algorithm, **options)

    for module in (wire, wire.message):
        monkeypatch.setattr(module, "decode", counted)
    run_ranks(local_world(ranks, timeout_seconds=30), program)
    schedule = SCHEDULES[algorithm](Order(length_for(ranks), K, ranks))
    lists = sum(step.times * (step.swaps + step.others) for step in schedule)
    # In oktopk's two allgathers, decoding the rank's own list is part of SEARCH_ and GATHER_SENDS.
    assert len(decoded) == ranks * (lists + 2 * (algorithm == "oktopk"))
