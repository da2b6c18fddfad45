"""A rank sends its next long message when its last one has come, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import local_world, run_ranks
from collectives.transports.recorder import RECEIVED, Event, Recorder
from collectives.transports.reductions import LONG_BYTES
from collectives.transports.seal import CHECKSUM_BYTES


def events_of(size: int, block_bytes: int) -> list[list[Event]]:
    """Return what every rank sends and receives in an allreduce of so many bytes a block."""
    world = local_world(size, timeout_seconds=30, kind=Recorder)
    run_ranks(world, lambda t: t.allreduce(np.ones(size * block_bytes // 4, np.float32)))
    return [transport.events for transport in world]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_long_message_is_answered_before_the_next_is_sent(size: int) -> None:
    for events in events_of(size, LONG_BYTES):
        assert len(events) == 6 * 2 * (size - 1).bit_length()
        rounds = zip(*(events[i::6] for i in range(6)), strict=True)
        for sent, checksum, received, word, its_checksum, answer in rounds:
            to, source = sent[0], received[0]
            assert sent[1] >= LONG_BYTES
            assert checksum == (to, CHECKSUM_BYTES)
            assert received == its_checksum == (source, RECEIVED)
            assert word == (source, 0)
            assert answer == (to, RECEIVED)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_short_messages_need_no_word(size: int) -> None:
    for events in events_of(size, LONG_BYTES // size):
        assert all(sent for _, sent in events)
