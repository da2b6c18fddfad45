"""A message that does not belong to the operation raises an error that names its sender."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, run_ranks
from collectives.transports import LocalTransport, local_world
from tests.collectives.transports.kinds import MESSAGE


@settings(max_examples=150)
@given(st.binary(max_size=60), st.booleans())
def test_bytes_that_are_no_part_of_an_allgather_are_an_error(content: bytes, counted: bool) -> None:
    receiver, babbler = local_world(2, timeout_seconds=5)
    head = (1).to_bytes(8, "little") if counted else b""
    message = head + content
    babbler.send(np.frombuffer(message, np.uint8), 0)
    if message.startswith(np.array([1, len(message) - 16], np.int64).tobytes()):  # by chance
        assert receiver.allgather(MESSAGE)[1].tobytes() == message[16:]
    else:
        with pytest.raises(MessageError, match="the message from rank 1 is malformed"):
            receiver.allgather(MESSAGE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GTKV\1\4\4\0" + bytes(24),
        np.array([1, 3], np.int64).tobytes(),
        np.array([1, -1], np.int64).tobytes(),
        np.array([2, 0, 0], np.int64).tobytes(),
        np.array([2**62, 0], np.int64).tobytes(),
        np.array([1, 1], np.int64).tobytes() + b"two",
    ],
)
def test_a_malformed_part_of_an_allgather_names_the_sender(content: bytes) -> None:
    receiver, babbler = local_world(2, timeout_seconds=5)
    babbler.send(np.frombuffer(content, np.uint8), 0)
    with pytest.raises(MessageError, match=f"from rank 1 is malformed: its {len(content)} bytes"):
        receiver.allgather(MESSAGE)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b"[" * 100_000], ids=len)
def test_an_object_that_is_no_json_names_the_sender(content: bytes) -> None:
    receiver, babbler = local_world(2, timeout_seconds=5)
    message = np.array([1, len(content)], np.int64).tobytes() + content
    babbler.send(np.frombuffer(message, np.uint8), 0)
    with pytest.raises(MessageError, match="the object from rank 1 is malformed"):
        receiver.gather_object("sound")
    babbler.send(np.frombuffer(content, np.uint8), 0)
    with pytest.raises(MessageError, match="the object from rank 1 is malformed"):
        receiver.broadcast_object(None, root=1)


def test_sizes_that_only_add_up_are_refused() -> None:
    receiver, neighbour, babbler, _ = local_world(4, timeout_seconds=5)
    neighbour.send(np.array([1, 0], np.int64).view(np.uint8), 0)
    babbler.send(np.array([2, -1, 1], np.int64).view(np.uint8), 0)
    with pytest.raises(MessageError, match=r"from rank 2 is malformed: .* not 2 packed messages"):
        receiver.allgather(MESSAGE)


def test_arrays_of_different_sizes_are_not_stretched_to_a_sum() -> None:
    # One element against two would be added to both of them.
    def program(transport: LocalTransport) -> None:
        transport.allreduce(np.ones(4 - 2 * transport.rank, np.float32))

    with pytest.raises(MessageError, match=r"from rank \d is malformed: .* (8 .* 16|16 .* 8);"):
        run_ranks(local_world(2, timeout_seconds=5), program)
