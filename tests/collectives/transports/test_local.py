"""Worlds of threads: their sizes, nodes and results."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives import PeerError, PeerTimeoutError, open_transport, run_ranks
from collectives.errors import CollectiveError
from collectives.transports import LocalTransport, local_world


def test_local_transport_of_a_process_has_one_rank() -> None:
    transport = open_transport("local")
    assert (transport.rank, transport.size, transport.name) == (0, 1, "local")
    assert transport.library() == "threads of one process"


@pytest.mark.parametrize("size", [0, -1])
def test_world_without_ranks_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least one rank, got size {size}"):
        local_world(size)


def test_neighbours_are_the_threads_of_a_node_of_the_given_size() -> None:
    world = local_world(5, node_size=2)
    assert [rank.neighbours() for rank in world] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    assert local_world(3)[2].neighbours() == [0, 1, 2]
    with pytest.raises(ValueError, match="at least one rank, got node_size 0"):
        local_world(5, node_size=0)


def test_run_ranks_returns_results_in_rank_order() -> None:
    assert run_ranks(local_world(5), lambda transport: transport.rank**2) == [0, 1, 4, 9, 16]


def test_local_world_of_64_ranks_works() -> None:
    def program(transport: LocalTransport) -> float:
        array = np.full(10_000, transport.rank, np.float32)
        transport.allreduce(array)
        transport.subset(range(transport.size)[::-1]).barrier()
        return float(array[0])

    assert run_ranks(local_world(64), program) == [64 * 63 / 2] * 64


def test_departing_rank_does_not_wait_for_a_failed_rank() -> None:
    def program(transport: LocalTransport) -> None:
        if transport.rank == 1:
            transport.leave("done")
        with pytest.raises(PeerError, match="done"):
            transport.receive(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(local_world(2, timeout_seconds=3600), program)


def test_failure_to_start_a_thread_ends_the_other_ranks(monkeypatch) -> None:
    start, left = threading.Thread.start, iter(range(3))

    def start_some(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(CollectiveError, match=r"allows 3 of 5 threads, .* can't start new thread"):
        run_ranks(local_world(5, timeout_seconds=3600), lambda transport: transport.barrier())


@pytest.mark.parametrize("announces", [False, True])
def test_long_wait_is_announced_only_if_enabled(monkeypatch, capsys, announces) -> None:
    monkeypatch.setattr("collectives.transports.carrier.STALL_WARNING_SECONDS", 0.01)
    waiting, _ = local_world(2, timeout_seconds=0.3, announces_waits=announces)
    for stream in (waiting, waiting.channel(1)):
        with pytest.raises(PeerTimeoutError):
            stream.receive(1)
        assert ("rank 0 has waited" in capsys.readouterr().err) == announces
