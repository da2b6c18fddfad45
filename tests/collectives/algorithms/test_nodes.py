"""Nodes are found from each rank's neighbours, or passed and checked."""

from __future__ import annotations

import pytest

from collectives.algorithms import find_nodes
from collectives.algorithms.hierarchical import checked_nodes


@pytest.mark.parametrize("size", [1, 2, 5])
def test_threads_are_one_node(threads, size: int) -> None:
    assert threads(size, find_nodes) == [[list(range(size))]] * size


def test_nodes_are_found_from_each_ranks_neighbours(threads) -> None:
    hosts = [[0, 3], [1, 2, 4], [5]]

    def program(transport):
        transport.neighbours = lambda: next(host for host in hosts if transport.rank in host)
        return find_nodes(transport)

    assert threads(6, program) == [hosts] * 6


def test_consecutive_ranks_form_nodes_of_a_given_size(threads) -> None:
    def program(transport):
        return find_nodes(transport, 2)

    assert threads(5, program) == [[[0, 1], [2, 3], [4]]] * 5


def test_nodes_given_in_any_order_are_sorted() -> None:
    assert checked_nodes([(4, 2), [], [3, 0, 1]], 5) == [[0, 1, 3], [2, 4]]


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]], []])
def test_nodes_without_each_rank_exactly_once_are_refused(nodes: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"each of the ranks 0\.\.2 in exactly one list, got \["):
        checked_nodes(nodes, 3)
