"""A rank sends its next long message only after its last one has arrived."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from collectives import local_world, run_ranks
from collectives.errors import MessageError
from collectives.transports import reductions
from collectives.transports.reductions import CHECKSUM_BYTES, LONG_BYTES
from mpi_scripts.replay.traces import RECEIVED, Event, Recorder

PIECE_BYTES = 2 * LONG_BYTES


def events_of(size: int, block_bytes: int) -> list[list[Event]]:
    """Return what every rank sends and receives in an allreduce of so many bytes a block."""
    world = local_world(size, timeout_seconds=30, kind=Recorder)
    run_ranks(world, lambda t: t.allreduce(np.ones(size * block_bytes // 4, np.float32)))
    return [transport.events for transport in world]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_long_messages_are_acknowledged_before_the_next_is_sent(size: int) -> None:
    for events in events_of(size, LONG_BYTES):
        assert len(events) == 6 * 2 * (size - 1).bit_length()
        rounds = zip(*(events[i::6] for i in range(6)), strict=True)
        for sent, checksum, received, its_checksum, acknowledgement, answer in rounds:
            to, source = sent[0], received[0]
            assert sent[1] >= LONG_BYTES
            assert checksum == (to, CHECKSUM_BYTES)
            assert received == its_checksum == (source, RECEIVED)
            assert acknowledgement == (source, 0)
            assert answer == (to, RECEIVED)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_short_messages_are_not_acknowledged(size: int) -> None:
    for events in events_of(size, LONG_BYTES // size):
        assert all(sent for _, sent in events)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_at_most_three_pieces_are_unacknowledged(size: int) -> None:
    with mock.patch.object(reductions, "PIECE_BYTES", PIECE_BYTES):
        events_of_ranks = events_of(size, 4 * PIECE_BYTES + LONG_BYTES)
    for events in events_of_ranks:
        unanswered, most, pieces = 0, 0, 0
        to = None
        for peer, what in events:
            if what >= LONG_BYTES:
                assert what <= PIECE_BYTES
                assert unanswered == 0 or peer == to
                to = peer
                unanswered, pieces = unanswered + 1, pieces + 1
                most = max(most, unanswered)
            elif what == RECEIVED and peer == to and unanswered:
                # Of three ranks and more a round's source is another one.
                unanswered -= 1
        assert most == 3
        assert unanswered == 0
        assert pieces >= 5 * 2 * (size - 1).bit_length()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 1000])
def test_allreduce_has_the_same_bits_for_any_piece_size(size: int, length: int) -> None:
    """Blocks, and with them the order of sums, are those of the whole array."""
    rows = np.random.default_rng(length).standard_normal((size, length)).astype(np.float32)

    def reduce(transport: Recorder) -> bytes:
        array = rows[transport.rank].copy()
        transport.allreduce(array)
        return array.tobytes()

    patches = {"LONG_BYTES": 16, "CHECKED_BYTES": 32, "_WHOLE_BYTES": 0}
    found = set()
    for piece_bytes in (8, 64, 1 << 20):
        with mock.patch.multiple(reductions, PIECE_BYTES=piece_bytes, **patches):
            found |= set(run_ranks(local_world(size, timeout_seconds=30), reduce))
    assert len(found) == 1
    total = np.frombuffer(found.pop(), np.float32)
    np.testing.assert_allclose(total, rows.sum(axis=0, dtype=np.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_reduce_scatter_of_unequal_blocks_in_pieces_is_exact(size: int) -> None:
    ends = np.cumsum([0, 100, *[3] * (size - 1)])
    ends[-1] += 50
    bounds = ends.tolist()

    def go(transport: Recorder) -> tuple[list[int], list[int]]:
        array = np.arange(bounds[-1]) * (transport.rank + 1)
        transport.reduce_scatter(array, bounds)
        mine = slice(*bounds[transport.rank : transport.rank + 2])
        part = array[mine].tolist()
        array[:] = -1
        array[mine] = part
        transport.allgather_into(array, bounds)
        return part, array.tolist()

    with mock.patch.multiple(reductions, PIECE_BYTES=64, LONG_BYTES=16):
        results = run_ranks(local_world(size, timeout_seconds=30), go)
    total = [n * size * (size + 1) // 2 for n in range(bounds[-1])]
    for rank, (part, whole) in enumerate(results):
        assert part == total[bounds[rank] : bounds[rank + 1]]
        assert whole == total


@pytest.mark.parametrize("size", [2, 3, 4])
def test_allreduce_in_pieces_of_arrays_of_different_lengths_is_refused(size: int) -> None:
    def go(transport: Recorder) -> None:
        transport.allreduce(np.zeros(1000 if transport.rank else 200, np.float32))

    with (
        mock.patch.multiple(reductions, PIECE_BYTES=256, LONG_BYTES=64, _WHOLE_BYTES=0),
        pytest.raises(MessageError, match="every rank must pass an array of one size"),
    ):
        run_ranks(local_world(size, timeout_seconds=30), go)
