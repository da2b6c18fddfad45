"""Every place of a round is claimed once and done, whichever workers die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import PeerError, PeerTimeoutError
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.adaptive.hogbatch.ledger import Ledger, WorkerTable, pause_seconds

LENGTH = 103


def open_ledger(transport: LocalTransport, **options: Any) -> Ledger:
    first = WorkerTable.size_bytes(transport.size)
    memory = transport.shared_memory(first + 4 * LENGTH)
    notes = memory.bytes[first:].view(np.int16).reshape(2, LENGTH)
    options = {"timeout_seconds": 20.0, **options}
    ledger = Ledger(memory, WorkerTable(memory), notes, ranks=transport.ranks, **options)
    ledger.end()
    return ledger


def work(ledger: Ledger, size: int) -> list[int]:
    """Do a round, and return the places done."""
    done: list[int] = []
    while claim := ledger.claim(size):
        done += claim
        ledger.finish(claim)
    while again := ledger.reclaim(size):
        done += again
        ledger.finish(again)
    ledger.end()
    return done


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_every_place_is_done_once_per_round(sizes: list[int]) -> None:
    def program(transport: LocalTransport) -> list[list[int]]:
        ledger = open_ledger(transport)
        rounds = []
        for length in (LENGTH, 17, LENGTH, 0, LENGTH):
            ledger.begin(length)
            rounds.append(work(ledger, sizes[transport.rank]))
        return rounds

    results = run_ranks(local_world(len(sizes), 20), program)
    for number, length in enumerate((LENGTH, 17, LENGTH, 0, LENGTH)):
        assert sorted(p for rounds in results for p in rounds[number]) == list(range(length))


class Killed(Exception):
    pass


@pytest.mark.parametrize("rank", [0, 2])
def test_claims_of_dead_worker_are_finished_by_others(rank: int) -> None:
    all_have_claimed = threading.Barrier(3)

    def program(transport: LocalTransport) -> list[int]:
        reported_dead: list[int] = []
        ledger = open_ledger(transport, ranks_may_leave=True, on_death=reported_dead.append)
        ledger.begin(LENGTH)
        claim = ledger.claim(10)
        all_have_claimed.wait()
        if transport.rank == rank:
            ledger.finish(claim[:3])
            raise Killed
        ledger.finish(claim)
        done = [*claim, *work(ledger, 10)]
        assert ledger._workers.rows["taken_over"].sum() == 7
        assert reported_dead == [rank]
        return done

    results: list[Any] = [[]] * 3

    def run(transport: LocalTransport) -> None:
        results[transport.rank] = program(transport)

    with pytest.raises(Killed):
        run_ranks(local_world(3, 20), run)
    done = sorted(place for places in results for place in places)
    finished_by_the_dead = set(range(LENGTH)) - set(done)
    assert len(done) == len(set(done))
    assert len(finished_by_the_dead) == 3


def test_round_begins_with_sums_of_all_workers_reset() -> None:
    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(transport)
        rows = ledger._workers.rows
        if transport.rank == 0:
            rows["losses"], rows["evaluated"] = 7.0, 3  # of both workers, in both rounds
        transport.barrier()
        for _ in range(2):
            ledger.begin(LENGTH)
            parity = ledger.round % 2
            assert rows["losses"][:, parity].tolist() == [0, 0]
            assert rows["evaluated"][:, parity].tolist() == [0, 0]
            work(ledger, 10)

    run_ranks(local_world(2, 20), program)


def test_departed_rank_raises_unless_ranks_may_leave() -> None:
    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(
            transport, departure_reason=lambda place: "it was told to" if place else ""
        )
        ledger.begin(LENGTH)
        ledger.claim(10)
        if transport.rank == 1:
            raise Killed
        with pytest.raises(PeerError, match=r"rank 1 left \(it was told to\).*ranks_may_leave"):
            ledger.reclaim(10)

    with pytest.raises(Killed):
        run_ranks(local_world(2, 20), program)


def test_worker_that_ends_round_and_leaves_is_not_counted_dead() -> None:
    ended = threading.Event()

    def program(transport: LocalTransport) -> list[int]:
        def leave(place: int) -> str:
            if place:  # it ends its round while this rank checks on it
                ledger._workers.rows["idle"][place] = ledger._workers.rows["over"][place] = (
                    ledger.round
                )
            return "it has left" if place else ""

        ledger = open_ledger(transport, departure_reason=leave)
        ledger.begin(LENGTH)
        if transport.rank == 1:
            ended.wait(20)
            return []
        done = work(ledger, 10)
        ended.set()
        return done

    assert sorted(run_ranks(local_world(2, 20), program)[0]) == list(range(LENGTH))


def test_timeout_error_names_silent_rank() -> None:
    let_go = threading.Event()

    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(transport, timeout_seconds=0.1)
        ledger.begin(LENGTH)
        if transport.rank == 1:
            let_go.wait(20)
            return
        with pytest.raises(PeerTimeoutError, match=r"for ranks \[1\] to finish their batches"):
            ledger.reclaim(10)
        let_go.set()

    run_ranks(local_world(2, 20), program)


def test_live_rank_with_departure_reason_raises_peer_error() -> None:
    let_go = threading.Event()

    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(transport, departure_reason=lambda place: "frozen" if place else "")
        ledger.begin(LENGTH)
        if transport.rank == 1:
            let_go.wait(20)
            return
        with pytest.raises(PeerError, match=r"rank 1 left \(frozen\)"):
            ledger.reclaim(10)
        let_go.set()

    run_ranks(local_world(2, 20), program)


def test_returned_claims_are_done_by_others() -> None:
    given_back = threading.Event()

    def program(transport: LocalTransport) -> list[int]:
        ledger = open_ledger(transport)
        ledger.begin(LENGTH)
        if transport.rank == 1:
            ledger.give_back(ledger.claim(20))
            ledger.end()
            given_back.set()
            return []
        given_back.wait(20)
        return work(ledger, 7)

    results = run_ranks(local_world(2, 20), program)
    assert sorted(results[0]) == list(range(LENGTH))


@pytest.mark.parametrize("check", [1, 2, 3, 4])
def test_last_claim_at_any_check_ends_wait_for_claims(check: int) -> None:
    """Regression: a claim between two checks of the next place left two workers idle.

    check: the number of the check for workers to wait for at which the last place is claimed.
    """

    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(transport, timeout_seconds=0.5)
        ledger.begin(1)
        checks = 0

        def faster() -> list[int]:
            nonlocal checks
            checks += 1
            if checks == check:
                ledger.claim(1)
            return [0]

        ledger.await_claims(faster)

    run_ranks(local_world(1, 20), program)


def test_notes_are_visible_before_worker_is_seen_idle() -> None:
    """Regression: notes were returned without the lock; another core could see "idle" first."""

    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(transport)
        ledger.begin(LENGTH)
        claim = ledger.claim(10)

        def leave() -> None:
            ledger.give_back(claim)
            ledger.end()

        thread = threading.Thread(target=leave)
        with ledger._memory.lock():
            thread.start()
            thread.join(0.1)
            assert (ledger._notes[claim] == 1).all()
            assert ledger._workers["idle"] == ledger._workers["over"] == ledger.round - 1
        thread.join()
        assert (ledger._notes[claim] == -2).all()
        assert ledger._workers["idle"] == ledger._workers["over"] == ledger.round

    run_ranks(local_world(1, 20), program)


def test_pause_between_polls_grows_with_waiting_time() -> None:
    pauses = [pause_seconds(seconds) for seconds in (0, 0.001, 0.016, 0.16, 10)]
    assert pauses == [2e-4, 2e-4, pytest.approx(1e-3), pytest.approx(0.01), 0.02]


def test_turns_rotate_and_skip_idle_workers() -> None:
    turns: list[int] = []

    def program(transport: LocalTransport) -> None:
        ledger = open_ledger(transport)
        ledger.begin(LENGTH)
        for _ in range(1 + transport.rank):
            ledger.take_turn()
            turns.append(transport.rank)
            ledger.pass_turn()
        ledger.end()

    run_ranks(local_world(3, 20), program)
    assert turns == [0, 1, 2, 1, 2, 2]


def test_nodes_share_one_counter_and_do_every_place_once(threads: Callable[..., Any]) -> None:
    """Two nodes of two workers each do every place once in each round."""

    def program(transport: LocalTransport) -> list[list[int]]:
        counter = transport.counter()
        node = transport.subset([transport.rank // 2 * 2, transport.rank // 2 * 2 + 1])
        ledger = open_ledger(node, counter=counter, stretch=9)
        rounds = []
        for _ in range(3):
            ledger.begin(LENGTH)
            rounds.append(work(ledger, 1 + transport.rank))
            transport.barrier()
            ledger._head["base"][0] = counter.add(0)  # as set in the merge at the end of an epoch
            transport.barrier()
        return rounds

    results = threads(4, program)
    for number in range(3):
        done = [place for rounds in results for place in rounds[number]]
        assert sorted(done) == list(range(LENGTH))
