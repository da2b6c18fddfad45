"""Departure notices, and ranks that leave without one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import PeerError
from collectives.transports import local_world, mpi
from collectives.transports.departure import DepartureNotice


def test_departure_notice_is_decoded_with_its_cause():
    died = DepartureNotice({}, "its connection is lost", lost=True)
    notice = DepartureNotice({0: 3, 1025: 7}, "it missed rank 1", (1, died))
    assert DepartureNotice.decode(notice.encode()) == notice


def test_lost_lists_dead_ranks_named_by_peers_but_not_departed_ranks():
    one, two, three, four = local_world(4)
    assert one.lost() == []
    three.announce_departure("its program ended")
    assert one.lost() == []
    two._left[1] = DepartureNotice(
        {}, "it missed rank 3", (3, DepartureNotice({}, "lost", lost=True))
    )
    assert one.lost() == [3]
    one._left[2] = DepartureNotice({}, "lost", lost=True)
    assert four.lost() == [2, 3]


def test_rank_departed_before_mpi_finalize_keeps_its_reason():
    transport = object.__new__(mpi.MpiTransport)
    transport.size, transport._mpi = 3, SimpleNamespace(Is_finalized=lambda: True)
    transport._left = {1: DepartureNotice({}, "its host is down", lost=True)}
    transport.collect_departures()
    assert [transport.departures()[rank].reason for rank in range(3)] == [
        *("MPI is finalized", "its host is down", "MPI is finalized"),
    ]
    assert transport.lost() == [1]


def test_buffer_of_an_abandoned_receive_is_kept_until_completion(monkeypatch):
    """In Open MPI, a late rank writes into the buffer of an abandoned receive."""
    kept = []
    monkeypatch.setattr(mpi, "_receiving", kept)
    transport = object.__new__(mpi.MpiTransport)
    transport._mpi_lock = contextlib.nullcontext()
    transport._mpi = SimpleNamespace(Is_finalized=lambda: False)
    completed = [False]
    memory, request = np.zeros(3, np.uint8), SimpleNamespace(Test=lambda: completed[0])
    with pytest.raises(PeerError), transport._keep_on_error(request, memory):
        raise PeerError("rank 1 left")
    with transport._keep_on_error(request, memory):
        pass
    ((its_request, its_memory),) = kept
    assert its_request is request
    assert its_memory is memory
    completed[0] = True
    with transport._keep_on_error(request, memory):
        pass
    assert not kept


def test_counter_keeps_its_memory_while_a_late_reply_may_still_arrive(monkeypatch):
    kept = []
    monkeypatch.setattr(mpi, "_receiving", kept)
    transport = object.__new__(mpi.MpiTransport)
    transport._mpi_lock, transport.timeout_seconds = contextlib.nullcontext(), 60.0
    transport._mpi = SimpleNamespace(Is_finalized=lambda: False)
    reply, request = SimpleNamespace(Test=lambda: False), SimpleNamespace(Test=lambda: True)
    posted = []
    communicator = SimpleNamespace(
        Irecv=lambda memory, source, tag: posted.append(memory) or reply,
        Isend=lambda memory, to, tag: request,
    )
    owner, stream = local_world(2)
    owner.announce_departure("its program ended")
    with pytest.raises(PeerError, match="rank 0 left"):
        mpi.ServedCounter(transport, communicator, stream).add(1)
    assert any(its is reply and memory is posted[0] for its, memory in kept)
