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
def test_arbitrary_bytes_in_an_allgather_raise_an_error(content: bytes, counted: bool) -> None:
    receiver, bad_sender = local_world(2, timeout_seconds=5)
    head = (1).to_bytes(8, "little") if counted else b""
    message = head + content
    bad_sender.send(np.frombuffer(message, np.uint8), 0)
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
def test_malformed_allgather_message_names_its_sender(content: bytes) -> None:
    receiver, bad_sender = local_world(2, timeout_seconds=5)
    bad_sender.send(np.frombuffer(content, np.uint8), 0)
    with pytest.raises(MessageError, match=f"from rank 1 is malformed: its {len(content)} bytes"):
        receiver.allgather(MESSAGE)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b"[" * 100_000], ids=len)
def test_object_that_is_not_json_names_its_sender(content: bytes) -> None:
    receiver, bad_sender = local_world(2, timeout_seconds=5)
    message = np.array([1, len(content)], np.int64).tobytes() + content
    bad_sender.send(np.frombuffer(message, np.uint8), 0)
    with pytest.raises(MessageError, match="the object from rank 1 is malformed"):
        receiver.gather_object("sound")
    bad_sender.send(np.frombuffer(content, np.uint8), 0)
    with pytest.raises(MessageError, match="the object from rank 1 is malformed"):
        receiver.broadcast_object(None, root=1)


def test_negative_allgather_sizes_with_a_valid_sum_are_refused() -> None:
    receiver, neighbour, bad_sender, _ = local_world(4, timeout_seconds=5)
    neighbour.send(np.array([1, 0], np.int64).view(np.uint8), 0)
    bad_sender.send(np.array([2, -1, 1], np.int64).view(np.uint8), 0)
    with pytest.raises(MessageError, match=r"from rank 2 is malformed: .* not 2 packed messages"):
        receiver.allgather(MESSAGE)


def test_allreduce_of_arrays_of_different_sizes_is_refused() -> None:
    # One element against two would be added to both of them.
    def program(transport: LocalTransport) -> None:
        transport.allreduce(np.ones(4 - 2 * transport.rank, np.float32))

    with pytest.raises(MessageError, match=r"from rank \d is malformed: .* (8 .* 16|16 .* 8);"):
        run_ranks(local_world(2, timeout_seconds=5), program)
