"""Ranks that leave or hang during messages over NCCL."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from collectives import PeerError, PeerTimeoutError
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import TransferHeader, TransferMethod
from tests.collectives import fake_cuda
from tests.collectives.transports.nccl.on_model import complete_first_exchange, message, on_ranks
from tests.programs.of_gpus import device, up


def announce_only(transport: NcclTransport, to: int) -> None:
    """Send a header only, like a rank that dies before its kernel."""
    transport.host.send(TransferHeader(TransferMethod.NCCL, 100).encode(), to)()


def assert_broken(transport: NcclTransport, cuda: Any, text: str) -> None:
    """Check that the communicator is aborted and later calls fail at once with the reason."""
    assert [c.aborted for c in cuda.communicators if c.rank == transport.rank] == [True]
    transport.host.send(TransferHeader(TransferMethod.NCCL, 100).encode(), transport.rank)()
    with pytest.raises(PeerError, match=text):
        transport.receive(transport.rank)


def test_departed_rank_raises_peer_error_before_any_kernel(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 1:
            transport.leave("its data ran out")
            return
        text = r"rank 1 left \(its data ran out\) while rank 0 waited for it in step 3"
        with pytest.raises(PeerError, match=text), transport.operation("step 3"):
            transport.exchange(up(message(100)), 1)
        assert not cuda.communicators[transport.rank].aborted or transport.size == 1
        transport.leave("a peer is gone")

    cuda.communicators.sort(key=lambda c: c.rank)
    on_ranks(2, program)


@pytest.mark.parametrize("connected", [True, False], ids=["in-a-kernel", "in-a-call"])
def test_rank_that_leaves_during_a_transfer_is_named(cuda: Any, connected: bool) -> None:
    def program(transport: NcclTransport) -> None:
        if connected:
            complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            transport.announce_departure("it broke down")
            return
        text = r"rank 1 left \(it broke down\) while rank 0 waited for it in bucket 2"
        with pytest.raises(PeerError, match=text), transport.operation("bucket 2"):
            transport.receive(1)
        assert_broken(transport, cuda, text)

    on_ranks(2, program)


def test_transfer_in_flight_completes_after_its_sender_left(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            transport.announce_departure("done")
            time.sleep(0.1)
            transport._transfer([(up(message(100, 1)), 0)], [])
        else:
            assert transport.receive(1).get().tobytes() == message(100, 1).tobytes()

    on_ranks(2, program)


@pytest.mark.parametrize("connected", [True, False], ids=["in-a-kernel", "in-a-call"])
def test_silent_rank_is_named_after_the_timeout(cuda: Any, connected: bool) -> None:
    receiver_done = threading.Event()

    def program(transport: NcclTransport) -> None:
        if connected:
            complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            receiver_done.wait(30)
            return
        text = r"rank 0 has waited \d+ s for rank 1 in an exchange"
        try:
            with pytest.raises(PeerTimeoutError, match=text):
                transport.receive(1)
            assert_broken(transport, cuda, text)
        finally:
            receiver_done.set()

    on_ranks(2, program, timeout_seconds=0.3)


def test_all_ranks_waiting_in_a_collective_name_the_departed_rank(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 2:
            transport.leave("early")
            return
        with (
            pytest.raises(PeerError, match=r"rank 2 left \(early\)"),
            transport.operation("step 1"),
        ):
            transport.allreduce(up(np.ones(4)))
        transport.leave("a peer is gone")

    on_ranks(4, program)


def test_nccl_async_error_raises_peer_error_that_names_both_ranks(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            return
        (own,) = (c for c in cuda.communicators if c.rank == 0)
        own.async_status = 6
        text = r"NCCL failed on rank 0 in an exchange, between it and ranks \[1\]: NCCL_ERROR 6"
        with pytest.raises(PeerError, match=text) as caught:
            transport.receive(1)
        assert not isinstance(caught.value, PeerTimeoutError)
        assert_broken(transport, cuda, text)

    on_ranks(2, program)


def test_failed_gpu_raises_without_waiting(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            return
        cuda.failed.add(0)
        with pytest.raises(fake_cuda.CUDARuntimeError, match="700"):
            transport.receive(1)
        assert_broken(transport, cuda, "CUDA status 700")

    on_ranks(2, program)


def test_nccl_status_unknown_to_cupy_raises_peer_error(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(transport: NcclTransport) -> None:
        def send(*_: object) -> None:
            raise KeyError(8)

        monkeypatch.setattr(fake_cuda.Communicator, "send", send)
        with pytest.raises(PeerError, match=r"NCCL failed on rank 0 .* \[0\]: 8"):
            transport.exchange(up(message(3)), 0)

    on_ranks(1, program)


def test_memory_that_a_kernel_may_still_write_is_not_freed(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.transports.nccl_collectives._ABORT_SECONDS", 0.05)
    given_up = threading.Event()

    def program(transport: NcclTransport) -> None:
        complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            assert given_up.wait(10)
            transport._transfer([(up(message(100)), 0)], [])
            return
        cuda.abort_hangs = True
        with pytest.raises(PeerTimeoutError) as caught:
            transport.receive(1)
        del caught
        gc.collect()
        given_up.set()

    on_ranks(2, program, timeout_seconds=0.3)
    assert cuda.moved_bytes == 1 + 1 + 100


def test_hanging_abort_does_not_block_the_rank(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.transports.nccl_collectives._ABORT_SECONDS", 0.05)
    cuda.abort_hangs = True

    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            announce_only(transport, 1)
            transport.announce_departure("gone")
        else:
            with pytest.raises(PeerError, match=r"rank 0 left \(gone\)"):
                transport.receive(0)

    on_ranks(2, program)


def test_rank_that_never_connects_raises_timeout_error(cuda: Any) -> None:
    done = threading.Event()

    def program(transport: NcclTransport) -> None:
        if transport.rank == 1:
            transport.host.channel(7).broadcast(None, 0)  # NCCL's unique id, and no more
            done.wait(30)
            return
        try:
            with pytest.raises(PeerTimeoutError, match=r"rank 0 has waited \d s for its peers"):
                transport.channel(7).connect()
        finally:
            done.set()

    on_ranks(2, program, timeout_seconds=0.3)


def test_waiting_thread_gets_an_error_when_its_rank_leaves(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It does not poll: it notices that the kernel was aborted.
    monkeypatch.setattr("collectives.transports.polling._CHECK_SECONDS", 3600)

    def program(transport: NcclTransport) -> None:
        complete_first_exchange(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            transport.leave("done")
            return
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                with device(0):
                    transport.receive(1)
            except PeerError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05)
        transport.leave("enough")
        waiting.join(10)
        assert "left (" in str(caught[0])

    on_ranks(2, program)
