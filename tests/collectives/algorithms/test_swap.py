"""Two ranks swap their lists, whole or in pieces, and hold the same afterwards."""

from __future__ import annotations

import re

import numpy as np
import pytest

from collectives import MessageError, SparseVector, local_world, run_ranks, wire
from collectives.algorithms import swap
from collectives.algorithms.gtopk_options import GtopkOptions
from collectives.algorithms.swap import swap_and_merge
from collectives.transports import LocalTransport
from collectives.wire import NOBODY, Format
from tests.collectives.algorithms.worlds import bits, entries


def test_pieces_are_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_BLOCK", 1)
    merged: list[tuple[list[int], list[int]]] = []
    merge = swap.merge

    def noting(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        merged.append((b.indices.tolist(), a.indices.tolist()))
        return merge(a, b, k)

    monkeypatch.setattr(swap, "merge", noting)
    mine, theirs = (
        [[int(index) for index in piece.split()] for piece in drawn.split("|")]
        for drawn in re.findall(r"    (?:mine|theirs) +((?:\d[ |]+)+?)  ", swap.__doc__)
    )
    told = re.findall(r"  ([\d ]+) (?:reaches|is).*, merged with ([\d ]+|none)", swap.__doc__)
    lists = [
        entries([(index, 1.0 + index) for piece in drawn for index in piece], 10, np.float32)
        for drawn in (mine, theirs)
    ]

    def program(transport: LocalTransport) -> None:
        if transport.rank == 0:
            swap_and_merge(lists[0], NOBODY, 9, transport, 1, GtopkOptions(pieces=3), 1)
            return
        for piece, indices in enumerate(theirs):
            part = lists[1].between(indices[0], indices[-1] + 1)
            message = wire.encode(part, 9, extra=GtopkOptions(pieces=3).stamp(piece)).message
            transport.send(message, 0)()
        sent = [
            wire.decode(transport.receive(0), lists[1], 9, 0, extra_bytes=3).vector for _ in mine
        ]
        assert [vector.indices.tolist() for vector in sent] == mine

    run_ranks(local_world(2, 30), program)
    assert merged[:3] == [
        ([int(i) for i in piece.split()], [int(i) for i in ours.replace("none", "").split()])
        for piece, ours in told
    ]


def test_pieces_that_overlap_are_an_error() -> None:
    options = GtopkOptions(pieces=2)

    def program(transport: LocalTransport) -> None:
        if transport.rank == 0:
            swap_and_merge(SparseVector.empty(9), NOBODY, 4, transport, 1, options, 1)
            return
        for piece, index in enumerate([5, 5]):
            part = entries([(index, 1.0)], 9, np.float32)
            transport.send(wire.encode(part, 4, extra=options.stamp(piece)).message, 0)()

    with pytest.raises(MessageError, match="piece 1 begins at index 5, the one before ended at 5"):
        run_ranks(local_world(2, 5), program)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_kept_and_dropped_are_the_whole_sum(pieces: int, random: np.random.Generator) -> None:
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
        lambda t: swap_and_merge(
            lists[t.rank], NOBODY, 700, t, 1 - t.rank, GtopkOptions(pieces=pieces), 1
        ),
    )
    kept, dropped = swap.merge(*lists, 700)
    for one in swapped:
        assert bits(one.merged) == bits(kept)
        assert bits(one.dropped) == bits(dropped)


@pytest.mark.parametrize("holders", [1, 4, 512])
def test_in_pieces_a_rank_puts_back_the_same_errors(
    holders: int, random: np.random.Generator
) -> None:
    dense = random.standard_normal(2000)
    mine = SparseVector.from_dense(dense)

    def swapped(pieces: int) -> list[swap.Swapped]:
        options = GtopkOptions(Format("raw", "bf16"), pieces=pieces)
        return run_ranks(
            local_world(2, 30),
            lambda t: swap_and_merge(mine, NOBODY, 2000, t, 1 - t.rank, options, holders),
        )

    for one, other in zip(swapped(1), swapped(3), strict=True):
        assert bits(one.error) == bits(other.error)
        assert one.error.entries > 0
