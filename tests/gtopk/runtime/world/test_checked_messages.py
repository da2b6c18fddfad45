"""GTOPK_CHECK_MESSAGES must be set on all ranks or none, and only if the transport supports it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives.transports import local_world, run_ranks
from gtopk.errors import HorovodInternalError
from gtopk.runtime.world import membership, world
from tests.started import under

SIZE = 3


def test_check_messages_is_off_unless_the_variable_is_1():
    mpi = SimpleNamespace(name="mpi")
    assert not under({}, membership.checks_messages_on, mpi)
    for text in ("", "0", "1"):
        is_wanted = under({"GTOPK_CHECK_MESSAGES": text}, membership.checks_messages_on, mpi)
        assert is_wanted == (text == "1")
    with pytest.raises(ValueError, match="GTOPK_CHECK_MESSAGES must be 0 or 1, got 'yes'"):
        under({"GTOPK_CHECK_MESSAGES": "yes"}, membership.checks_messages_on, mpi)


def test_check_messages_is_refused_over_nccl():
    nccl = SimpleNamespace(name="nccl")
    assert not under({}, membership.checks_messages_on, nccl)
    with pytest.raises(ValueError, match="GTOPK_TRANSPORT=staged"):
        under({"GTOPK_CHECK_MESSAGES": "1"}, membership.checks_messages_on, nccl)


@pytest.mark.parametrize("text", ["0", "1"])
def test_world_checks_messages_as_the_variable_says(monkeypatch, text):
    monkeypatch.setenv("GTOPK_CHECK_MESSAGES", text)

    def program(transport):
        with world.entered(transport):
            return transport.checks_messages, transport.channel(5).checks_messages

    assert run_ranks(local_world(SIZE), program) == [(text == "1",) * 2] * SIZE


def test_error_names_both_settings_when_ranks_differ(monkeypatch):
    monkeypatch.setattr(membership, "checks_messages_on", lambda transport: transport.rank == 1)

    def program(transport):
        with pytest.raises(HorovodInternalError) as caught, world.entered(transport):
            pass
        return str(caught.value)

    for text in run_ranks(local_world(SIZE), program):
        assert "GTOPK_CHECK_MESSAGES=1" in text
        assert "GTOPK_CHECK_MESSAGES=0" in text
