"""Laws of transports that send a checksum with every message, on any number of ranks.

Called at the end of collectives_transports.py, and by tests in threads: it leaves checks on, and
the ranks in the middle of a failed reduction.
"""

from __future__ import annotations

import sys

import numpy as np

from collectives import CollectiveError, MessageError, Transport, local_world, run_ranks
from collectives.transports import LocalTransport, Traffic

LENGTHS = (1, 3, 1000, 9000)


def rows_of(length: int, ranks: int) -> np.ndarray:
    return np.random.default_rng(length).standard_normal((ranks, length)).astype(np.float32)


def reduced(transport: Transport, length: int) -> tuple[bytes, Traffic]:
    """Return the bits of a sum, and the bytes that this rank sent for it."""
    transport.traffic.read_and_reset()
    array = rows_of(length, transport.size)[transport.rank].copy()
    transport.allreduce(array)
    return array.tobytes(), transport.traffic.read_and_reset()


def check_checked_messages(transport: Transport) -> None:
    """Check that sums use our own messages, with the same bits, and that a change is an error."""
    transport.check_messages()
    view = transport.channel(9).subset(range(transport.size))
    assert transport.checks_messages
    assert view.checks_messages
    assert transport.native_bytes() == view.native_bytes() == sys.maxsize

    def in_threads(reference: LocalTransport) -> list[tuple[bytes, Traffic]]:
        reference.check_messages()
        return [reduced(reference, length) for length in LENGTHS]

    world = local_world(transport.size, timeout_seconds=60)
    expected = run_ranks(world, in_threads)[transport.rank]
    for stream in (transport, view):
        for length, of_reference in zip(LENGTHS, expected, strict=True):
            assert reduced(stream, length) == of_reference, length
    for block in (1, 3000):
        bounds = [block * rank for rank in range(transport.size + 1)]
        gathered = np.full(bounds[-1], transport.rank, np.int32)
        stream.allgather_into(gathered, bounds)
        assert gathered.tolist() == np.arange(transport.size).repeat(block).tolist()
    transport.barrier()
    if transport.size > 1:
        check_a_flipped_bit(transport)


def check_a_flipped_bit(transport: Transport) -> None:
    """Flip a bit in the last rank's message: its receiver names that rank to all."""
    culprit = transport.size - 1
    if transport.rank == culprit:
        send_on = transport.send_on

        def send_changed_on(stream, message, to):
            message = message.copy()
            message[message.size // 2] ^= 16
            return send_on(stream, message, to)

        transport.send_on = send_changed_on
    text = ""
    try:
        with transport.operation("a sum"):
            transport.allreduce(np.ones(6, np.float32))
    except CollectiveError as error:
        text = str(error)
        transport.announce_departure(f"it raised {type(error).__name__}: {text}")
        if isinstance(error, MessageError):
            assert transport.rank != culprit
    if transport.rank != culprit:  # it got all messages intact, and may be done
        assert f"the message from rank {culprit} is malformed" in text, text
