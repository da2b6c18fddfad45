"""Messages of GPUs, over NCCL or through pinned memory, on a model of both: fake_cuda.py.

What runs on real GPUs is in test_nccl_gpu.py.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from collectives import (
    MismatchError,
    PeerError,
    PeerTimeoutError,
    Transport,
    open_transport,
    run_ranks,
)
from collectives.cost import dense_bytes, rounds
from collectives.transports import local_world
from collectives.transports.announcement import ANNOUNCEMENT_BYTES, Announcement, Way
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import StagedTransport

HERE = Path(__file__).parent
SIZES = [1, 2, 3, 5]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_cuda = load(HERE / "fake_cuda.py")
laws = load(HERE.parent / "programs" / "collectives_transports.py")
of_gpus = load(HERE.parent / "programs" / "of_gpus.py")
OfGpus, device, up = of_gpus.OfGpus, of_gpus.device, of_gpus.up


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with 8 GPUs, on which nothing may go wrong."""
    cuda = fake_cuda.Cuda(gpus=8)
    fake_cuda.install(monkeypatch, cuda)
    yield cuda
    cuda.off.set()
    cuda.change()
    assert cuda.wrongs == []


def message(size: int, *seed: int) -> np.ndarray:
    return laws.message(size, *seed)


def on_ranks(
    size: int,
    program: Callable[[NcclTransport], Any],
    timeout_seconds: float = 20,
    staged: bool = False,
) -> list[Any]:
    """Run a program on ranks with a GPU each, that GPU being the current one."""

    def rank(host: Transport) -> Any:
        with device(host.rank):
            if staged:
                return program(StagedTransport(host))
            return program(NcclTransport(host, timeout_seconds=timeout_seconds))

    return run_ranks(local_world(size, timeout_seconds), rank)


# ---- the laws of every transport


def ids(law: Callable[..., None]) -> str:
    return law.__name__.removeprefix("test_")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("law", laws.LAWS, ids=ids)
def test_hosts_messages_travel_as_on_any_transport(cuda: Any, law: Any, size: int) -> None:
    on_ranks(size, law)
    assert cuda.moved_bytes == 0


@pytest.mark.parametrize("staged", [False, True], ids=["nccl", "staged"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("law", of_gpus.without_counts(laws.LAWS), ids=ids)
def test_messages_of_gpus_travel_as_on_any_transport(
    cuda: Any, law: Any, size: int, staged: bool
) -> None:
    on_ranks(size, lambda transport: law(OfGpus(transport)), staged=staged)
    assert not (staged and cuda.moved_bytes)


@pytest.mark.parametrize("staged", [False, True], ids=["nccl", "staged"])
@pytest.mark.parametrize("size", SIZES)
def test_parts_that_ranks_own_are_reduced_and_gathered_as_on_hosts(
    cuda: Any, size: int, staged: bool
) -> None:
    # Small integers: any order of additions gives the same bits.
    lengths = [size, 3 * size + 1, 0, 1]
    cuts = [[n * rank // size for rank in range(size + 1)] for n in lengths]
    cuts.append([0, *[5] * size])  # one owns it all

    def program(transport: Transport) -> None:
        over_gpus, host = OfGpus(transport), transport.host
        mine = slice(transport.rank, transport.rank + 2)
        for dtype, bounds, reduction in itertools.product(laws.DTYPES, cuts, laws.REDUCTIONS):
            rows = np.random.default_rng(bounds).choice([-2, -1, 1, 2], (size, bounds[-1]))
            array, expected = (rows[transport.rank].astype(dtype) for _ in range(2))
            over_gpus.reduce_scatter(array, bounds, reduction)
            host.reduce_scatter(expected, bounds, reduction)
            own = slice(*bounds[mine])
            assert array[own].tolist() == expected[own].tolist()
            array = rows[0].astype(dtype)
            gathered = np.full_like(array, 7)
            gathered[own] = array[own]
            over_gpus.allgather_into(gathered, bounds)
            assert gathered.tolist() == array.tolist()

    on_ranks(size, program, staged=staged)


# ---- which way a message takes


def test_partners_swap_over_nccl(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        received = transport.exchange(up(message(100, transport.rank)), transport.rank ^ 1)
        assert received.get().tobytes() == message(100, transport.rank ^ 1).tobytes()

    on_ranks(4, program)
    assert cuda.moved_bytes == 4 * 100


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_pass_messages_round_over_nccl(cuda: Any, size: int) -> None:
    def program(transport: NcclTransport) -> None:
        rank = transport.rank
        for shift in range(1, size + 1):
            source = (rank - shift) % size
            sent = up(message(10 * rank, rank))
            (received,) = transport.exchange_all([(sent, (rank + shift) % size)], [source])
            assert received.get().tobytes() == message(10 * source, source).tobytes()

    on_ranks(size, program)
    assert cuda.moved_bytes == size * sum(10 * rank for rank in range(size))


def test_a_send_that_is_waited_for_at_once_goes_over_nccl(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            transport.send(up(message(100, 1)), 1)()
        else:
            assert transport.receive(0).get().tobytes() == message(100, 1).tobytes()

    on_ranks(2, program)
    assert cuda.moved_bytes == 100


def test_a_send_that_must_not_block_goes_through_the_host(cuda: Any) -> None:
    # Everyone sends to everyone before anyone receives: NCCL's kernels would wait for each other.
    def program(transport: NcclTransport) -> None:
        waits = [transport.send(up(message(9, transport.rank)), to) for to in range(4)]
        for source in reversed(range(4)):
            assert transport.receive(source).get().tobytes() == message(9, source).tobytes()
        for wait in waits:
            wait()

    on_ranks(4, program)
    assert cuda.moved_bytes == 0


@pytest.mark.parametrize("operation", ["barrier", "broadcast", "channel", "send", "allreduce"])
def test_a_send_is_on_its_way_whatever_comes_before_its_wait(cuda: Any, operation: str) -> None:
    def program(transport: NcclTransport) -> None:
        peer = 1 - transport.rank
        waits = [transport.send(up(message(9, 1)), peer)] if transport.rank == 0 else []
        if transport.rank == 1:
            assert transport.receive(0).get().tobytes() == message(9, 1).tobytes()
        if operation == "channel":
            transport.channel(1).exchange(up(message(5)), peer)
        elif operation == "send":
            waits.append(transport.send(message(3), peer))
            transport.receive(peer)
        elif operation == "allreduce":
            transport.allreduce(np.zeros(3))
        elif operation == "broadcast":
            transport.broadcast(message(4), 1)
        else:
            transport.barrier()
        for wait in waits:
            wait()
            wait()  # once more changes nothing

    on_ranks(2, program)
    assert cuda.moved_bytes == 0


def test_a_rank_may_send_to_itself(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        transport.send(up(message(9)), 0)()
        assert transport.receive(0).get().tobytes() == message(9).tobytes()

    on_ranks(1, program)


def test_messages_of_hosts_and_gpus_keep_their_order(cuda: Any) -> None:
    like_an_announcement = Announcement(Way.NCCL, 7).encode()
    sent = [message(5, 1), up, message(0, 2), up, like_an_announcement, message(24, 3), up]

    def program(transport: NcclTransport) -> None:
        waits = []
        for number, content in enumerate(sent):
            whose = up(message(number, 9)) if content is up else content
            if transport.rank == 0:
                waits.append(transport.send(whose, 1))
                continue
            received = transport.receive(0)
            assert isinstance(received, np.ndarray) == (content is not up)
            host = received.get() if content is up else received
            assert host.tobytes() == (message(number, 9) if content is up else content).tobytes()
        for wait in waits:
            wait()

    on_ranks(2, program)


def test_a_host_may_swap_with_a_gpu(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        mine = message(10 + transport.rank, transport.rank)
        for turn in range(2):
            sends_host = transport.rank == turn
            received = transport.exchange(mine if sends_host else up(mine), 1 - transport.rank)
            assert isinstance(received, np.ndarray) != sends_host
            host = received.get() if sends_host else received
            assert host.tobytes() == message(11 - transport.rank, 1 - transport.rank).tobytes()

    on_ranks(2, program)
    assert cuda.moved_bytes == 11 + 10


def test_a_view_goes_over_nccl_once_its_ranks_have_connected_it(cuda: Any) -> None:
    def program(transport: NcclTransport) -> int:
        view = transport.subset([2, 0]) if transport.rank != 1 else None
        moved = []
        for _ in range(2):
            if view is not None:
                swapped = view.exchange(up(message(10, view.rank)), 1 - view.rank)
                assert swapped.get().tobytes() == message(10, 1 - view.rank).tobytes()
            transport.barrier()
            moved.append(cuda.moved_bytes)
            if view is not None:
                view.connect()
            transport.barrier()
        return moved

    assert on_ranks(3, program) == [[0, 20]] * 3


def test_connected_channels_are_used_at_once_each_by_a_thread(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        channels = [transport.channel(number) for number in range(3)]
        for channel in channels:
            channel.connect()

        def swap(channel: Transport) -> None:
            with device(transport.rank):
                for turn in range(5):
                    mine = message(30 * turn + channel.tag, transport.rank)
                    swapped = channel.exchange(up(mine), 1 - transport.rank)
                    theirs = message(30 * turn + channel.tag, 1 - transport.rank)
                    assert swapped.get().tobytes() == theirs.tobytes()
                    array = up(np.full(5, channel.tag))
                    channel.allreduce(array)
                    assert set(array.get().tolist()) == {2 * channel.tag}

        turns = channels[:: 1 if transport.rank else -1]
        laws.together(*(lambda c=channel: swap(c) for channel in turns))

    on_ranks(2, program)
    assert cuda.moved_bytes == 2 * sum(30 * t + tag for t in range(5) for tag in (1, 2, 3))


def test_what_is_received_lies_on_the_transports_gpu(cuda: Any) -> None:
    # Whichever is current.
    def program(transport: NcclTransport) -> None:
        sent = up(message(8, transport.rank))
        with device(7):
            swapped = transport.exchange(sent, 1 - transport.rank)
            staged = transport.channel(1).exchange(sent, 1 - transport.rank)
            gathered = transport.allgather(sent)
        for received in (swapped, staged, *gathered):
            assert received.device == sent.device == device(transport.rank)
        for rank in range(2):
            assert gathered[rank].get().tobytes() == message(8, rank).tobytes()
        assert swapped.get().tobytes() == message(8, 1 - transport.rank).tobytes()
        assert staged.get().tobytes() == message(8, 1 - transport.rank).tobytes()

    on_ranks(2, program)
    assert cuda.moved_bytes == 16  # an allgather is a collective, not counted here


def test_a_message_is_sent_as_the_callers_stream_makes_it(cuda: Any) -> None:
    # The array is still being written, on a stream of the caller's own, when it is given away.
    def program(transport: NcclTransport) -> None:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Stream(non_blocking=True):
            for turn in range(5):
                sent = cupy.empty(64, np.uint8)
                for step in range(10):
                    sent[...] = up(message(64, turn, step, transport.rank))
                swapped = transport.exchange(sent, 1 - transport.rank)
                expected = message(64, turn, 9, 1 - transport.rank)
                assert swapped.get().tobytes() == expected.tobytes()

    on_ranks(2, program)


def test_a_message_may_be_forgotten_while_it_is_sent(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            wait = transport.send(up(message(64, 1)), 1)
            wait()
        else:
            time.sleep(0.05)
            assert transport.receive(0).get().tobytes() == message(64, 1).tobytes()

    on_ranks(2, program)


def test_what_nobody_waited_for_is_sent_before_its_rank_leaves(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            transport.send(up(message(64, 1)), 1)
        else:
            assert transport.receive(0).get().tobytes() == message(64, 1).tobytes()
        transport.leave("done")

    on_ranks(2, program)


@pytest.mark.parametrize("size", SIZES)
def test_what_gpus_send_is_counted_with_its_announcements(cuda: Any, size: int) -> None:
    def program(transport: NcclTransport) -> None:
        transport.traffic.take()
        transport.exchange(up(message(100)), transport.rank)
        counted = transport.traffic.take()
        assert counted.sent_bytes == 100 + ANNOUNCEMENT_BYTES
        assert counted.sent_messages == 2
        transport.allgather(message(50))
        agreement = transport.traffic.take()
        transport.allgather(up(message(1000)))
        counted = transport.traffic.take()
        own = dense_bytes(0, size) + (size - 1) * 1000
        assert counted.sent_bytes - own == agreement.sent_bytes - (size - 1) * (
            50 - ANNOUNCEMENT_BYTES
        )
        transport.allreduce(up(np.zeros(1000, np.float32)))
        counted = transport.traffic.take()
        assert counted.sent_messages == (3 * rounds(size) if size > 1 else 0)
        assert counted.sent_bytes >= dense_bytes(1000, size)

    on_ranks(size, program)


# ---- what is refused


def test_arrays_that_differ_are_named_by_all_ranks_and_the_job_goes_on(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        arrays = [
            np.zeros(5 + (transport.rank == 2)),
            np.zeros(5, [int, float][transport.rank % 2]),
        ]
        text = r"rank 2 asks for allreduce \(sum\) of float64 \[6\] where rank 0 asks for .*\[5\]"
        with pytest.raises(MismatchError, match=text):
            transport.allreduce(up(arrays[0]))
        with pytest.raises(MismatchError, match=r"rank 1 asks for .*float64 .* rank 0 .*int64"):
            transport.allreduce(up(arrays[1]), "max")
        bounds = [0, 1 + transport.rank // 2, 3, 5]
        with pytest.raises(MismatchError, match=r"cut at \[0, 2, 3, 5\] where .* \[0, 1, 3, 5\]"):
            transport.reduce_scatter(up(np.zeros(5)), bounds)
        total = up(np.ones(5))
        transport.allreduce(total)
        assert total.get().tolist() == [3] * 5

    on_ranks(3, program)


def test_a_dtype_that_nccl_does_not_know_is_refused(cuda: Any) -> None:
    with pytest.raises(TypeError, match=r"NCCL reduces int8, .*; got complex64"):
        on_ranks(2, lambda transport: transport.allreduce(up(np.zeros(3, np.complex64))))


def test_messages_of_hosts_and_gpus_are_not_gathered_together(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            transport.allgather(message(100))
        else:
            with pytest.raises(
                MismatchError, match="rank 0 gathers messages of hosts where rank 1"
            ):
                transport.allgather(up(message(100)))

    on_ranks(2, program)


@pytest.mark.parametrize("fault", ["dtype", "strides", "gpu"])
def test_only_contiguous_bytes_of_the_own_gpu_are_sent(cuda: Any, fault: str) -> None:
    def program(transport: NcclTransport) -> None:
        with device(1 if fault == "gpu" else 0):
            array = up(np.zeros(8, np.float32 if fault == "dtype" else np.uint8))
        array = array[::2] if fault == "strides" else array
        text = {
            "dtype": r"must be uint8 \[m\], got float32 \[8\]",
            "strides": "contiguous and there, got one on <CUDA Device 0> with strides",
            "gpu": "rank 0 sends from <CUDA Device 0>.* got one on <CUDA Device 1>",
        }[fault]
        with pytest.raises(ValueError, match=text):
            transport.exchange(array, 0)
        with pytest.raises(ValueError, match=text):
            transport.send(array, 0)

    on_ranks(1, program)


def test_a_message_over_nccl_needs_nccl_on_both_sides(cuda: Any) -> None:
    def program(host: Transport) -> None:
        if host.rank == 0:
            host.send(Announcement(Way.NCCL, 9).encode(), 1)()
        else:
            with pytest.raises(MismatchError, match="rank 0 sends over NCCL, which rank 1 is not"):
                StagedTransport(host).receive(0)

    run_ranks(local_world(2), program)


# ---- who leaves, and who is silent


def announce_only(transport: NcclTransport, to: int) -> None:
    """Do what a rank has done that dies between its announcement and its kernel."""
    transport.host.send(Announcement(Way.NCCL, 100).encode(), to)()


def meet(transport: NcclTransport) -> None:
    """Let the first swap be over, so that it is kernels that wait."""
    transport.exchange(up(message(1)), 1 - transport.rank)


def assert_broken(transport: NcclTransport, cuda: Any, text: str) -> None:
    """Check that what is left says why at once."""
    assert [c.aborted for c in cuda.communicators if c.rank == transport.rank] == [True]
    transport.host.send(Announcement(Way.NCCL, 100).encode(), transport.rank)()
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
            transport.resign("it broke down")
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
            transport.resign("done")
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
        text = r"rank 0 has waited 0 s for rank 1 in an exchange"
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
    monkeypatch.setattr("collectives.transports.nccl_communicator._ABORT_SECONDS", 0.05)
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
    monkeypatch.setattr("collectives.transports.nccl_communicator._ABORT_SECONDS", 0.05)
    cuda.abort_hangs = True

    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            announce_only(transport, 1)
            transport.resign("gone")
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
            with pytest.raises(PeerTimeoutError, match="rank 0 has waited 0 s for its peers"):
                transport.channel(7).connect()
        finally:
            done.set()

    on_ranks(2, program, timeout_seconds=0.3)


def test_whoever_still_waits_when_its_rank_leaves_gets_an_error(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It does not look: it finds that the kernel has ended, for it was aborted.
    monkeypatch.setattr("collectives.transports.patience._LOOK_SECONDS", 3600)

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


# ---- which GPU


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_gpu_are_named_on_all_ranks(cuda: Any, ranks: int) -> None:
    cuda.gpus = 1
    said = []

    def program(host: Transport) -> None:
        with pytest.raises(RuntimeError) as caught:
            NcclTransport(host)
        said.append(str(caught.value))

    run_ranks(local_world(ranks), program)
    text = (
        f"transport 'nccl' needs a GPU for each rank, but ranks {list(range(ranks))} share "
        "0000:00:00.0, which NCCL refuses; open_transport('staged', bootstrap=...) goes through "
        "pinned host memory instead"
    )
    assert said == [text] * ranks


def test_a_host_with_fewer_gpus_than_ranks_is_refused_on_all_ranks(cuda: Any) -> None:
    cuda.gpus = 2

    def program(host: Transport) -> str:
        with pytest.raises(RuntimeError) as caught:
            NcclTransport(host)
        return str(caught.value)

    said = run_ranks(local_world(3), program)
    text = "needs a GPU for each rank, but rank 2 is number 3 of 3 on its host, which has 2"
    assert text in said[2]
    assert said[:2] == [f"rank 2 cannot use NCCL: {said[2]}"] * 2


def test_a_rank_may_choose_its_gpu(cuda: Any) -> None:
    def program(host: Transport) -> None:
        transport = NcclTransport(host, device=5 - host.rank)
        with device(5 - host.rank):
            meet(transport)
        transport.leave("done")

    run_ranks(local_world(2), program)
    assert sorted(c.device for c in cuda.communicators) == [4, 5]


def test_a_gpu_that_is_not_there_is_refused(cuda: Any) -> None:
    with pytest.raises(RuntimeError, match=r"device must lie in 0\.\.7 .*got 8"):
        NcclTransport(local_world(1)[0], device=8)


def test_a_rank_without_a_gpu_says_so(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(sys.modules["cupy.cuda"].runtime, "getDeviceCount", count)
    text = r"transport 'nccl' needs a GPU; rank 0 has none \(cudaErrorInsufficientDriver\)"
    with pytest.raises(RuntimeError, match=text):
        NcclTransport(local_world(1)[0])


def test_what_nccl_refuses_at_the_start_is_an_error(cuda: Any) -> None:
    # Two containers of one host may hide from us that they share a GPU; not from NCCL.
    def program(host: Transport) -> None:
        host.neighbours = lambda: [host.rank]
        with pytest.raises(PeerError, match=r"NCCL failed on rank \d .* \[0, 1\]: NCCL_ERROR 5"):
            NcclTransport(host, device=0)

    run_ranks(local_world(2), program)


# ---- what must be installed


def test_open_transport_opens_both(cuda: Any) -> None:
    (host,) = local_world(1)
    nccl = open_transport("nccl", bootstrap=host)
    assert (nccl.name, nccl.library(), nccl.supports_device_messages) == (
        "nccl",
        "NCCL 2.32.3",
        True,
    )
    staged = open_transport("staged", bootstrap=host)
    assert (staged.name, staged.library()) == (host.name, host.library())
    assert staged.supports_device_messages


@pytest.mark.parametrize("name", ["nccl", "staged"])
def test_both_need_a_bootstrap(name: str) -> None:
    with pytest.raises(ValueError, match=rf"open_transport\('{name}'\) needs bootstrap="):
        open_transport(name)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = r"transport 'nccl' needs cupy and NCCL \(.*cupy.*\): pip install gtopk\[cuda12\]"
    with pytest.raises(ImportError, match=text):
        open_transport("nccl", bootstrap=local_world(1)[0])
    with pytest.raises(ImportError, match=r"'local' needs cupy, for .*: pip install gtopk\[cuda12"):
        open_transport("staged", bootstrap=local_world(1)[0])


def test_without_nccl_the_error_says_what_to_install(cuda: Any) -> None:
    sys.modules["cupy.cuda.nccl"].available = False
    text = r"'nccl' needs cupy and NCCL \(CuPy finds no libnccl\): pip install gtopk\[cuda12\]"
    with pytest.raises(ImportError, match=text):
        open_transport("nccl", bootstrap=local_world(1)[0])


def test_a_rank_without_cupy_is_named_by_the_others(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = threading.local()
    find = importlib.import_module

    def import_module(name: str) -> ModuleType:
        if where.rank == 1:
            raise ImportError(f"No module named {name!r}")
        return find(name)

    monkeypatch.setattr("collectives.transports.gpu.importlib.import_module", import_module)

    def program(host: Transport) -> BaseException:
        where.rank = host.rank
        with pytest.raises((ImportError, RuntimeError)) as caught:
            NcclTransport(host)
        return caught.value

    errors = run_ranks(local_world(3), program)
    assert [type(error) for error in errors] == [RuntimeError, ImportError, RuntimeError]
    assert str(errors[0]) == str(errors[2]) == f"rank 1 cannot use NCCL: {errors[1]}"


# ---- the model itself


def test_the_model_has_cupys_names_and_arguments() -> None:
    cupy = pytest.importorskip("cupy")
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    for name, module in fake_cuda.Cuda(gpus=0).modules().items():
        real = importlib.import_module(name)
        for attribute in (a for a in vars(module) if not a.startswith("__")):
            assert hasattr(real, attribute), f"{name}.{attribute}"
            if attribute.startswith("NCCL_"):
                assert getattr(real, attribute) == getattr(module, attribute)
    for name in ("send", "recv", "allReduce", "reduce", "broadcast", "check_async_error", "abort"):
        real = getattr(nccl.NcclCommunicator, name).__doc__.splitlines()[0]  # (self, ...)
        model = inspect.signature(getattr(fake_cuda.Communicator, name))
        assert real.count(",") == len(model.parameters) - 1
    for model, real in [
        (fake_cuda.Stream, cupy.cuda.Stream),
        (fake_cuda.Event, cupy.cuda.Event),
        (fake_cuda.Device, cupy.cuda.Device),
        (fake_cuda.ndarray, cupy.ndarray),
    ]:
        own = {name for name in vars(model) if not name.startswith("_")} - {"numbers"}
        assert own <= set(dir(real))


def pair_of_communicators(cuda: Any) -> list[Any]:
    nccl = sys.modules["cupy.cuda.nccl"]
    unique_id, made = nccl.get_unique_id(), {}

    def make(rank: int) -> None:
        with device(rank):
            made[rank] = nccl.NcclCommunicator(2, unique_id, rank)

    laws.together(*(lambda r=rank: make(r) for rank in range(2)))
    return [made[0], made[1]]


def launch(cuda: Any, communicator: Any, calls: list[tuple[str, Any]]) -> Any:
    """Enqueue calls as one group; return the event of their end."""
    cupy, nccl = sys.modules["cupy"], sys.modules["cupy.cuda.nccl"]
    with device(communicator.device):
        stream = cupy.cuda.Stream(non_blocking=True)
        nccl.groupStart()
        for name, array in calls:
            getattr(communicator, name)(
                array.data.ptr, array.size, 1, 1 - communicator.rank, stream.ptr
            )
        nccl.groupEnd()
        return stream.record()


def array_on(number: int, size: int) -> Any:
    with device(number):
        array = up(np.full(size, number, np.uint8))
        array.get()
        return array


@pytest.mark.parametrize(
    ("mine", "theirs", "ends"),
    [
        ([("send", 4), ("recv", 4)], [("send", 4), ("recv", 4)], True),
        ([("send", 4)], [("recv", 4)], True),
        ([("send", 4)], [("recv", 5)], False),
    ],
)
def test_the_model_ends_what_matches_and_nothing_else(
    cuda: Any, mine: list[Any], theirs: list[Any], ends: bool
) -> None:
    communicators = pair_of_communicators(cuda)
    events, keep = [], []

    def start(rank: int, calls: list[Any]) -> None:
        arrays = [(name, array_on(rank, size)) for name, size in calls]
        keep.append(arrays)
        events.append(launch(cuda, communicators[rank], arrays))

    laws.together(lambda: start(0, mine), lambda: start(1, theirs))
    deadline = time.monotonic() + (10 if ends else 0.1)
    while time.monotonic() < deadline and not all(event.done for event in events):
        time.sleep(0.001)
    assert all(event.done for event in events) == ends
    communicators[0].abort()
    with pytest.raises(fake_cuda.NcclError):
        communicators[0].check_async_error()


def test_in_the_model_sends_that_face_each_other_outside_of_a_group_never_end(cuda: Any) -> None:
    communicators = pair_of_communicators(cuda)
    arrays = [array_on(rank, 4) for rank in range(2)]
    both = [("send", 4), ("recv", 4)]
    events = {}

    def start(rank: int) -> None:
        own = arrays[rank]
        in_a_group = launch(cuda, communicators[rank], [(name, own) for name, _ in both])
        for name, _ in both:
            events[rank, name] = launch(cuda, communicators[rank], [(name, own)])
        while not in_a_group.done:
            time.sleep(0.001)

    laws.together(lambda: start(0), lambda: start(1))
    time.sleep(0.1)
    assert not any(event.done for event in events.values())


def test_in_the_model_freed_memory_is_a_wrong(cuda: Any) -> None:
    address = array_on(0, 4).data.ptr
    assert cuda.bytes_at(address, 4, 0).size == 4
    assert cuda.wrongs.pop() == "4 bytes were used after they were freed"


def test_in_the_model_an_array_is_no_hosts() -> None:
    cuda = fake_cuda.Cuda(gpus=1)
    array = fake_cuda.asarray(cuda, np.arange(3))
    for use in (np.asarray, list, np.sum):
        with pytest.raises(TypeError):
            use(array)
    assert array.get().tolist() == [0, 1, 2]
    assert array._content is not None
    cuda.off.set()
