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
    """Return what each rank gets, a word or an error."""

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


def test_all_ranks_of_a_start_get_one_word_and_every_start_another(store) -> None:
    words = []
    for size in (3, 3, 2, 5, 1, 3):
        found = start(store, size)
        assert len(set(found)) == 1
        words.append(found[0])
    assert len(set(words)) == len(words)


def test_who_is_not_there_is_named_by_all(store) -> None:
    first, second = start(store, 3, ranks=[0, 1], timeout_seconds=0.3)
    for rank, error in ((0, first), (1, second)):
        assert str(error).startswith(f"rank {rank} of 3 has waited 0.")
        assert "s at the start for rank 2: " in str(error)


def test_who_was_there_before_but_is_not_now_is_named_too(store) -> None:
    start(store, 3)
    for error in start(store, 3, ranks=[0, 2], timeout_seconds=0.5):
        assert "at the start for rank 1: " in str(error)


def test_without_rank_0_nobody_goes_on_with_the_last_starts_word(store) -> None:
    start(store, 2)
    (error,) = start(store, 2, ranks=[1], timeout_seconds=0.3)
    assert isinstance(error, PeerTimeoutError)


def test_the_last_word_of_a_rank_that_is_ending_does_not_keep_the_others_apart(store) -> None:
    """It was slow to start, and writes over the word of the rank that has taken its place."""

    class Written:
        """A store in which that happens just after the first call."""

        def __getattr__(self, name: str):
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            store.set(key, value)
            if key == "call" and not store.check(["written over"]):
                store.set("written over", "once")
                store.set("here-2", "dead")

    found = start(Written(), 3)
    assert len(set(found)) == 1
    assert isinstance(found[0], str)


def test_a_number_that_two_processes_have_is_told_by_both_at_once(store) -> None:
    """RANK=0, 1, 1 instead of 0, 1, 2: a rank that waits for rank 2 reports it on timeout."""
    first, *twins = start(store, 3, ranks=[0, 1, 1], timeout_seconds=2.0)
    for twin in twins:
        assert isinstance(twin, MismatchError)
        assert str(twin).startswith("two processes are rank 1 of 3: this one (host ")
        assert str(twin).count(f"pid {os.getpid()}") == 2
    assert "at the start for rank 2: " in str(first)


def test_one_process_too_many_does_not_keep_silent(store) -> None:
    found = start(store, 3, ranks=[0, 1, 1, 2], timeout_seconds=2.0)
    assert any(isinstance(each, MismatchError) for each in found[1:3])
    words = {each for each in found if isinstance(each, str)}
    assert len(words) <= 1  # the others begin with one of them, or with none


def test_a_store_that_is_gone_is_told(store) -> None:
    class Gone:
        def set(self, *arguments: object) -> None:
            raise torch.distributed.DistNetworkError("connection reset")

        check = set

    error = start(Gone(), 2, ranks=[1])[0]
    assert "the others, and the store where the ranks meet no longer answers" in str(error)


def test_they_learn_each_others_hosts(store) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: agree_on_start(store, rank, 2, 30.0), range(2)))
    assert found[0] == found[1]
    assert found[0].hosts == [socket.gethostname()] * 2


def test_who_waits_polls_less_and_less_often(store, monkeypatch) -> None:
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
