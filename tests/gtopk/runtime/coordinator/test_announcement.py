"""All ranks receive a rank's announcement unchanged; cached names cost a bit each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import MessageError
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.runtime.coordinator.fusion import Layout
from gtopk.runtime.coordinator.operation import (
    Announcement,
    OperationSpec,
    cycle_bytes,
    gather_announcements,
)

any_flags = st.integers(-(1 << 63), (1 << 63) - 1)
layouts = st.builds(
    Layout, st.just("<f4"), st.integers(0, 1 << 40), st.just("sum"), st.floats(-2, 2), st.floats(0)
)
specs = st.builds(
    OperationSpec,
    st.lists(st.text(max_size=5), max_size=3).map(tuple),
    st.none() | st.binary(max_size=5),
    st.lists(layouts, max_size=2).map(tuple),
)
announcements = st.builds(
    Announcement,
    ready=st.integers(0, (1 << 70) - 1),
    fresh=st.lists(st.tuples(st.text(max_size=5), specs, any_flags), max_size=3).map(tuple),
    changed_flags=st.dictionaries(st.integers(0, 69), any_flags, max_size=3),
    joins=st.booleans(),
    leaves=st.none() | st.text(max_size=5),
    expired=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    stuck=st.none() | st.text(max_size=5),
    limits=st.just(()) | st.just((1024, 1 << 26)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(announcements, min_size=1, max_size=4))
def test_gather_announcements_returns_every_ranks_announcement(sent: list[Announcement]) -> None:
    def program(transport: LocalTransport) -> list[Announcement]:
        return gather_announcements(transport, sent[transport.rank], 70)

    for received in run_ranks(local_world(len(sent), 20), program):
        assert received == sent


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("names", [0, 1, 64, 65, 1000])
def test_cached_names_cost_a_bit_each_in_one_message_a_round(threads, ranks, names):
    def program(transport: LocalTransport) -> tuple[int, int]:
        transport.traffic.read_and_reset()
        ready = (1 << names) - 1 >> transport.rank  # different on each rank
        gather_announcements(transport, Announcement(ready), names)
        taken = transport.traffic.read_and_reset()
        return taken.sent_bytes, taken.sent_messages

    expected = cycle_bytes(ranks, names), (ranks - 1).bit_length()
    assert threads(ranks, program) == [expected] * ranks


def test_malformed_announcement_error_names_its_sender(threads):
    def program(transport: LocalTransport) -> None:
        if transport.rank == 1:
            transport.allgather_into(np.full(24, 7, np.uint8), range(0, 25, 8))
            return
        with pytest.raises(MessageError, match="the message from rank 1 is malformed"):
            gather_announcements(transport, Announcement(), 0)

    threads(3, program)
