"""The pictures in the docstrings show the real messages, and their costs are as stated."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest

from collectives import SparseVector, reduce, run_ranks
from collectives.algorithms import gtopk, gtopk_tree
from collectives.transports import Traffic, local_world
from collectives.wire import HEADER_BYTES
from tests.collectives.algorithms.worlds import every_size, random_picks


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
    """Return a rank's sends and receives in the pictured rounds; it sends first in each."""
    events = []
    for messages in rounds:
        events += [("to", to) for source, to in messages if source == rank]
        events += [("from", source) for source, to in messages if to == rank]
    return events


def test_recursive_doubling_messages_are_as_drawn(witness, random: np.random.Generator) -> None:
    pairs, picture = pictured(gtopk, "<->")
    swaps = [[*column, *((b, a) for a, b in column)] for column in pairs]
    assert [len(column) for column in swaps] == [4, 4]
    picks = random_picks(random, 6, 100, 5)

    four = witness(4)
    run_ranks(four.world, lambda t: gtopk.reduce(picks[t.rank], 5, t))
    for rank in range(4):
        assert four.schedule(rank) == seen_by(rank, swaps)

    assert picture[0].endswith("P = 6: ranks 4 and 5 (guests) first send their picks to")
    assert "0 and 1, and get the result back last." in picture[1]
    folded = [[(4, 0), (5, 1)], *swaps, [(0, 4), (1, 5)]]
    six = witness(6)
    run_ranks(six.world, lambda t: gtopk.reduce(picks[t.rank], 5, t))
    for rank in range(6):
        assert six.schedule(rank) == seen_by(rank, folded)


def test_tree_messages_are_as_drawn(witness, random: np.random.Generator) -> None:
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
def test_four_gtopk_ranks_send_two_messages_of_eight_bytes_per_entry(k: int) -> None:
    # All ranks pick the same k entries, so every merged list has k entries too.
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    world = local_world(4, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "gtopk"))
    for transport in world:
        assert transport.traffic.read_and_reset() == Traffic(2 * (HEADER_BYTES + 8 * k), 2)


@pytest.mark.parametrize("k", [1, 8, 9])
def test_tree_rank_sends_one_list_up_and_alive_bits_down_to_each_child(k: int) -> None:
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    up, down = HEADER_BYTES + 8 * k, HEADER_BYTES + 8 * k + math.ceil(k / 8)
    world = local_world(6, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "gtopk-tree"))
    children = [3, 0, 1, 0, 1, 0]
    assert [t.traffic.read_and_reset() for t in world] == [
        Traffic((rank > 0) * up + count * down, (rank > 0) + count)
        for rank, count in enumerate(children)
    ]


def test_folded_rank_sends_its_picks_and_receives_alive_bits(witness) -> None:
    k = 9
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    world = witness(3)
    run_ranks(world.world, lambda t: reduce(pick, k, t, "gtopk"))
    sizes = [event.message.size for event in world.events[2]]
    assert sizes == [HEADER_BYTES + 8 * k, HEADER_BYTES + 8 * k + 2]


@every_size
def test_topk_allgather_rank_sends_one_list_per_other_rank(size: int) -> None:
    k = 10
    pick = SparseVector.from_dense(np.ones(k, np.float32))
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: reduce(pick, k, t, "topk-allgather"))
    rounds = (size - 1).bit_length()
    lists = (size - 1) * (HEADER_BYTES + 8 * k)
    size_bytes = 8 * rounds + 8 * (size - 1)  # per round the number of lists, per list its size
    for transport in world:
        assert transport.traffic.read_and_reset() == Traffic(lists + size_bytes, rounds)
