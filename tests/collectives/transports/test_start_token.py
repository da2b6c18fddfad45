"""Ranks find each other through a store, even with entries of earlier ranks in it."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from collectives.errors import CollectiveError, MismatchError, PeerTimeoutError
from collectives.transports import rendezvous
from collectives.transports.rendezvous import agree_on_start

torch = pytest.importorskip("torch")


def start(store, size: int, ranks: list[int] | None = None, timeout_seconds: float = 30.0):
    """Return each rank's token or error."""

    def rank(number: int):
        try:
            return agree_on_start(store, number, size, timeout_seconds).token
        except CollectiveError as error:
            return error

    chosen = list(range(size)) if ranks is None else ranks
    with ThreadPoolExecutor(len(chosen)) as pool:
        return list(pool.map(rank, chosen))


@pytest.fixture
def store():
    return torch.distributed.HashStore()


def test_ranks_of_a_start_agree_on_a_token_that_differs_per_start(store) -> None:
    tokens = []
    for size in (3, 3, 2, 5, 1, 3):
        found = start(store, size)
        assert len(set(found)) == 1
        tokens.append(found[0])
    assert len(set(tokens)) == len(tokens)


def test_missing_rank_is_named_by_all_at_the_start(store) -> None:
    first, second = start(store, 3, ranks=[0, 1], timeout_seconds=0.3)
    for rank, error in ((0, first), (1, second)):
        assert str(error).startswith(f"rank {rank} of 3 has waited 0.")
        assert "s at the start for rank 2: " in str(error)


def test_rank_of_an_earlier_start_that_is_missing_now_is_named(store) -> None:
    start(store, 3)
    for error in start(store, 3, ranks=[0, 2], timeout_seconds=0.5):
        assert "at the start for rank 1: " in str(error)


def test_token_of_an_earlier_start_is_not_reused_without_rank_0(store) -> None:
    start(store, 2)
    (error,) = start(store, 2, ranks=[1], timeout_seconds=0.3)
    assert isinstance(error, PeerTimeoutError)


def test_ranks_agree_although_an_ending_rank_overwrites_an_entry(store) -> None:
    """The ending rank started slowly, and overwrites the entry of the rank that replaces it."""

    class OverwritingStore:
        """A store in which this happens just after the first call."""

        def __getattr__(self, name: str):
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            store.set(key, value)
            if key == "call" and not store.check(["written over"]):
                store.set("written over", "once")
                store.set("here-2", "dead")

    found = start(OverwritingStore(), 3)
    assert len(set(found)) == 1
    assert isinstance(found[0], str)


def test_processes_with_the_same_rank_both_raise_mismatch_error(store) -> None:
    """RANK=0, 1, 1 instead of 0, 1, 2: a rank that waits for rank 2 reports it on timeout."""
    first, *twins = start(store, 3, ranks=[0, 1, 1], timeout_seconds=2.0)
    for twin in twins:
        assert isinstance(twin, MismatchError)
        assert str(twin).startswith("two processes are rank 1 of 3: this one (host ")
        assert str(twin).count(f"pid {os.getpid()}") == 2
    assert "at the start for rank 2: " in str(first)


def test_surplus_process_causes_mismatch_error(store) -> None:
    found = start(store, 3, ranks=[0, 1, 1, 2], timeout_seconds=2.0)
    assert any(isinstance(each, MismatchError) for each in found[1:3])
    tokens = {each for each in found if isinstance(each, str)}
    assert len(tokens) <= 1  # the other ranks have this token, or none


def test_lost_store_is_reported_at_the_start(store) -> None:
    class LostStore:
        def set(self, *arguments: object) -> None:
            raise torch.distributed.DistNetworkError("connection reset")

        check = set

    error = start(LostStore(), 2, ranks=[1])[0]
    assert "the others, and the store where the ranks meet no longer answers" in str(error)


def test_ranks_learn_all_hosts_at_the_start(store) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: agree_on_start(store, rank, 2, 30.0), range(2)))
    assert found[0] == found[1]
    assert found[0].hosts == [socket.gethostname()] * 2


def test_waiting_rank_polls_less_and_less_often(store, monkeypatch) -> None:
    """Ranks come together: a pause of 10 ms between the first polls would be most of the start."""
    now, pauses = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    with pytest.raises(PeerTimeoutError):
        agree_on_start(store, 0, 2, 1.0)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.001
    assert pauses[-1] == 0.01
    assert len(pauses) < 150
