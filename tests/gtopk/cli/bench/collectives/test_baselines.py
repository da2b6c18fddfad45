"""Baselines add up what they say they add up."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.transports import Transport
from collectives.vector import SparseVector
from gtopk.cli.bench.collectives import contenders as baselines
from gtopk.cli.bench.collectives.cases import picks
from gtopk.cli.bench.collectives.library import open_library

LENGTH, K = 2_000, 100


def everyones(size: int) -> list[SparseVector]:
    return [picks("clustered", LENGTH, K, rank, seed=3) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_plain_allgather_gives_the_sum_of_all_picks(threads, size: int) -> None:
    def program(transport: Transport) -> SparseVector:
        library = open_library(transport, range(size))
        return baselines.plain_allgather(everyones(size)[transport.rank], K, size, library)

    expected = np.sum([vector.to_dense() for vector in everyones(size)], axis=0, dtype=float)
    for update in threads(size, program):
        assert update.to_dense() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("binomial", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_published_tree_keeps_the_k_largest_of_each_merge(
    threads, size: int, binomial: bool
) -> None:
    def program(transport: Transport) -> SparseVector:
        library = open_library(transport, range(size))

        def broadcast(message: np.ndarray) -> None:
            if binomial:
                baselines.binomial_broadcast(message, transport.rank, size, library)
            else:
                library.broadcast(message, 0)

        return baselines.published_tree(
            everyones(size)[transport.rank], K, transport.rank, size, library, broadcast
        )

    def tree(ranks: list[np.ndarray]) -> np.ndarray:
        if len(ranks) == 1:
            return ranks[0]
        half = 1 << ((len(ranks) - 1).bit_length() - 1)
        total = tree(ranks[:half]) + tree(ranks[half:])
        kept = np.argsort(-np.abs(total), kind="stable")[:K]
        return np.where(np.isin(np.arange(LENGTH), kept), total, 0)

    expected = tree([vector.to_dense() for vector in everyones(size)])
    updates = threads(size, program)
    for update in updates:
        assert update.to_dense() == pytest.approx(expected, abs=1e-5)


def test_an_entry_of_the_published_tree_has_16_bytes() -> None:
    vector = everyones(1)[0]
    message = baselines.in_sixteen_bytes(vector, K + 1)
    assert message.nbytes == 16 * (K + 1)
    again = baselines.of_sixteen_bytes(message.view(np.float64).reshape(2, -1), vector)
    for part, other in zip(again, vector, strict=True):
        np.testing.assert_array_equal(part, other)


def test_what_a_library_sends_is_reckoned_at_the_least_there_can_be(threads) -> None:
    size = 4

    def program(transport: Transport) -> list[int]:
        library = open_library(transport, range(size))
        sent = []
        for operation in (
            lambda: library.allreduce(np.ones(1_000, np.float32)),
            lambda: library.allgather(np.zeros(50, np.uint8)),
            lambda: library.broadcast(np.zeros(50, np.uint8), 0),
        ):
            operation()
            sent.append(library.traffic.read_and_reset().sent_bytes)
        return sent

    *passing_on, last = threads(size, program)
    assert passing_on == [[6_000, 150, 50]] * 3
    assert last == [6_000, 150, 0]
