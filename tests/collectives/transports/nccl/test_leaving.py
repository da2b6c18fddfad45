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
from tests.collectives.transports.nccl.on_model import meet, message, on_ranks
from tests.programs.of_gpus import device, up


def announce_only(transport: NcclTransport, to: int) -> None:
    """Act like a rank that dies between its header and its kernel."""
    transport.host.send(TransferHeader(TransferMethod.NCCL, 100).encode(), to)()


def assert_broken(transport: NcclTransport, cuda: Any, text: str) -> None:
    """Check that what is left says why at once."""
    assert [c.aborted for c in cuda.communicators if c.rank == transport.rank] == [True]
    transport.host.send(TransferHeader(TransferMethod.NCCL, 100).encode(), transport.rank)()
    with pytest.raises(PeerError, match=text):
        transport.receive(transport.rank)


def test_a_rank_that_left_is_missed_without_a_kernel(cuda: Any) -> None:
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


@pytest.mark.parametrize("met", [True, False], ids=["in-a-kernel", "in-a-call"])
def test_a_rank_that_leaves_in_the_midst_is_named(cuda: Any, met: bool) -> None:
    def program(transport: NcclTransport) -> None:
        if met:
            meet(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            transport.announce_departure("it broke down")
            return
        text = r"rank 1 left \(it broke down\) while rank 0 waited for it in bucket 2"
        with pytest.raises(PeerError, match=text), transport.operation("bucket 2"):
            transport.receive(1)
        assert_broken(transport, cuda, text)

    on_ranks(2, program)


def test_what_was_on_its_way_when_its_sender_left_still_arrives(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        meet(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            transport.announce_departure("done")
            time.sleep(0.1)
            transport._transfer([(up(message(100, 1)), 0)], [])
        else:
            assert transport.receive(1).get().tobytes() == message(100, 1).tobytes()

    on_ranks(2, program)


@pytest.mark.parametrize("met", [True, False], ids=["in-a-kernel", "in-a-call"])
def test_a_silent_rank_is_named_after_the_timeout(cuda: Any, met: bool) -> None:
    silent = threading.Event()

    def program(transport: NcclTransport) -> None:
        if met:
            meet(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            silent.wait(30)
            return
        text = r"rank 0 has waited \d+ s for rank 1 in an exchange"
        try:
            with pytest.raises(PeerTimeoutError, match=text):
                transport.receive(1)
            assert_broken(transport, cuda, text)
        finally:
            silent.set()

    on_ranks(2, program, timeout_seconds=0.3)


def test_all_who_wait_in_a_collective_miss_who_left(cuda: Any) -> None:
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


def test_what_nccl_notices_itself_is_an_error_with_both_ranks(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        meet(transport)
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


def test_a_gpu_that_fails_is_not_waited_for(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        meet(transport)
        if transport.rank == 1:
            announce_only(transport, 0)
            return
        cuda.failed.add(0)
        with pytest.raises(fake_cuda.CUDARuntimeError, match="700"):
            transport.receive(1)
        assert_broken(transport, cuda, "CUDA status 700")

    on_ranks(2, program)


def test_a_status_that_cupy_has_no_name_for_is_an_error_all_the_same(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(transport: NcclTransport) -> None:
        def send(*_: object) -> None:
            raise KeyError(8)

        monkeypatch.setattr(fake_cuda.Communicator, "send", send)
        with pytest.raises(PeerError, match=r"NCCL failed on rank 0 .* \[0\]: 8"):
            transport.exchange(up(message(3)), 0)

    on_ranks(1, program)


def test_memory_that_a_kernel_may_still_write_is_not_given_away(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.transports.nccl_collectives._ABORT_SECONDS", 0.05)
    given_up = threading.Event()

    def program(transport: NcclTransport) -> None:
        meet(transport)
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


def test_an_abort_that_hangs_does_not_hang_us(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_rank_that_never_connects_is_missed(cuda: Any) -> None:
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


def test_whoever_still_waits_when_its_rank_leaves_gets_an_error(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It does not poll: it notices that the kernel was aborted.
    monkeypatch.setattr("collectives.transports.polling._CHECK_SECONDS", 3600)

    def program(transport: NcclTransport) -> None:
        meet(transport)
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
