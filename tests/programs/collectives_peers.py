"""Run on two or more ranks: errors of the others if a rank leaves, is silent or sends nonsense.

Argument: the transport.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from collectives_job import job

from collectives import (
    CollectiveError,
    MessageError,
    PeerError,
    PeerTimeoutError,
    SparseVector,
    Transport,
    open_transport,
    reduce,
)
from collectives.transports import carrier, mpi, polling, torch_distributed

NAME = sys.argv[1]


def new_transport(timeout_seconds: float) -> Transport:
    """Return another transport of the same ranks."""
    return open_transport(NAME, timeout_seconds)


CONTROL = new_transport(timeout_seconds=60)
RANK, SIZE = CONTROL.rank, CONTROL.size
LAST = SIZE - 1
MESSAGE = np.arange(10, dtype=np.uint8)


def check_departure_ends(call: Callable[[Transport], object]) -> None:
    """Check that the last rank's departure ends the operation on every other rank."""
    transport = new_transport(timeout_seconds=60)
    with transport.operation("step 0"):
        transport.barrier()
    if RANK == LAST:
        transport.leave("its data ran out")
        return
    with pytest.raises(PeerError) as caught, transport.operation("bucket 3 of step 1"):
        call(transport)
    assert type(caught.value) is PeerError
    text = str(caught.value)
    # Also if another rank noticed it first, and left with that as its reason.
    assert text == (
        f"rank {LAST} left (its data ran out) while rank {RANK} waited for it in bucket 3 of step 1"
    )
    transport.leave(text)


def test_departed_rank_ends_the_operation_on_every_rank() -> None:
    check_departure_ends(lambda transport: transport.barrier())
    check_departure_ends(lambda transport: transport.allreduce(np.zeros(10, np.float16)))
    check_departure_ends(lambda transport: reduce(SparseVector.empty(10), 3, transport))


def test_departed_rank_ends_the_librarys_native_allreduce() -> None:
    check_departure_ends(lambda transport: transport.allreduce(np.zeros(10)))
    with (
        mock.patch.object(mpi, "_BLOCKING_BYTES", 64),
        mock.patch.object(torch_distributed, "NATIVE_BYTES", 64),
    ):
        check_departure_ends(lambda transport: transport.allreduce(np.zeros(10)))


def test_departed_rank_ends_the_wait_for_a_rank_that_waits_for_it() -> None:
    if SIZE < 3:
        return
    transport = new_transport(timeout_seconds=60)
    if RANK == 0:
        text = rf"rank {LAST} left \(enough\) while rank 0 waited for it in a chain"
        with pytest.raises(PeerError, match=text), transport.operation("a chain"):
            transport.receive(1)
    elif RANK != LAST:
        with pytest.raises(PeerError, match=r"rank 0 left \(enough\)"):
            transport.receive(0)
    transport.leave("enough")


def test_departed_rank_ends_operations_on_channels_and_subsets() -> None:
    check_departure_ends(lambda transport: transport.channel(1).barrier())
    check_departure_ends(lambda transport: transport.subset([RANK]).channel(1).receive(0))


def test_messages_sent_before_a_departure_still_arrive() -> None:
    transport = new_transport(timeout_seconds=60)
    if RANK == LAST:
        for peer in range(LAST):
            transport.send(MESSAGE, peer)()
    else:
        time.sleep(0.05)
        assert transport.receive(LAST).tobytes() == MESSAGE.tobytes()
        with pytest.raises(PeerError, match=rf"rank {LAST} left \(done\) .* in an exchange"):
            transport.receive(LAST)
    transport.leave("done")


def test_message_arriving_with_the_departure_notice_is_not_lost() -> None:
    if NAME != "mpi":
        return
    transport = new_transport(timeout_seconds=60)
    if RANK != LAST:

        def arrived() -> str | None:
            return "in time" if LAST in transport._left else None

        assert transport._wait(transport, arrived, LAST) == "in time"
    transport.leave("done")


def test_rank_may_leave_after_completing_the_operation() -> None:
    transport = new_transport(timeout_seconds=60)
    with transport.operation("the only step"):
        gathered = transport.allgather(MESSAGE[:RANK])
    assert [m.size for m in gathered] == list(range(SIZE))
    transport.leave("done")


def test_silent_rank_is_named_after_the_timeout() -> None:
    transport = new_transport(timeout_seconds=1.0)
    if RANK == 0:
        text = rf"rank 0 has waited [\d.]+ s for rank {LAST} in a long wait$"
        with (
            mock.patch.object(polling, "STALL_WARNING_SECONDS", 0.05),
            mock.patch.object(carrier, "STALL_WARNING_SECONDS", 0.05),
            pytest.raises(PeerTimeoutError, match=text),
            transport.operation("a long wait"),
        ):
            transport.receive(LAST)
    CONTROL.barrier()
    transport.leave("done")


def test_waiting_rank_takes_little_cpu_time() -> None:
    transport = new_transport(timeout_seconds=60)
    if RANK == LAST:
        time.sleep(2)
        transport.send(MESSAGE, 0)()
    elif RANK == 0:
        begun = time.thread_time()  # a library's own threads may poll as much as they like
        transport.receive(LAST)
        assert time.thread_time() - begun < 1, "of the thread that waits, in two seconds"
    transport.leave("done")


def test_malformed_message_ends_the_reduction_on_every_rank() -> None:
    transport = new_transport(timeout_seconds=60)
    paired = 1 << (SIZE.bit_length() - 1)
    partner = LAST ^ 1 if paired > LAST else LAST - paired
    if RANK == LAST:
        transport.send(MESSAGE, partner)()
    else:
        with pytest.raises(CollectiveError) as caught, transport.operation("step 0"):
            reduce(SparseVector.empty(10), 3, transport)
        assert isinstance(caught.value, MessageError if partner == RANK else PeerError)
        named = f"message from rank {LAST} is malformed: 10 bytes" if partner == RANK else "rank"
        assert named in str(caught.value)
    transport.leave("a message was malformed")


if __name__ == "__main__":
    with job(CONTROL):
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test()
    print(f"rank {RANK} of {SIZE}: everyone was missed\n", end="", flush=True)
