"""Messages of GPUs over NCCL or through pinned memory, and the choice between these."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import Transport
from collectives.cost import dense_bytes, rounds
from collectives.transports import nccl_collectives
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import (
    TRANSFER_HEADER_BYTES,
    TransferHeader,
    TransferMethod,
)
from tests.collectives import fake_cuda
from tests.collectives.transports.nccl.on_model import SIZES, message, on_ranks
from tests.matrix import some_of
from tests.programs import collectives_transports as laws
from tests.programs.of_gpus import OfGpus, device, up, without_counts


def law_name(law: Callable[..., None]) -> str:
    return law.__name__.removeprefix("test_")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("law", laws.LAWS, ids=law_name)
def test_host_messages_keep_the_transport_laws_over_nccl(cuda: Any, law: Any, size: int) -> None:
    on_ranks(size, law)
    assert cuda.moved_bytes == 0


@pytest.mark.parametrize("staged", [False, True], ids=["nccl", "staged"])
@pytest.mark.parametrize("size", some_of(SIZES, 2, 3))
@pytest.mark.parametrize("law", without_counts(laws.LAWS), ids=law_name)
def test_gpu_messages_keep_the_transport_laws(cuda: Any, law: Any, size: int, staged: bool) -> None:
    on_ranks(size, lambda transport: law(OfGpus(transport)), staged=staged)
    assert not (staged and cuda.moved_bytes)


@pytest.mark.parametrize("staged", [False, True], ids=["nccl", "staged"])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_and_allgather_of_gpu_arrays_equal_those_of_hosts(
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


# ---- which route a message takes


def test_staged_reduction_allocates_no_gpu_memory(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(transport: Transport) -> None:
        array = up(np.arange(100.0))
        for name in ("asarray", "empty", "zeros"):
            monkeypatch.delattr(sys.modules["cupy"], name)
        transport.allreduce(array)
        assert array.get().tolist() == list(range(100))

    on_ranks(1, program, staged=True)
    assert [kind for kind, _, size in cuda.copies if size == 800] == ["up", "down", "up", "down"]


def test_exchange_goes_over_nccl(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        received = transport.exchange(up(message(100, transport.rank)), transport.rank ^ 1)
        assert received.get().tobytes() == message(100, transport.rank ^ 1).tobytes()

    on_ranks(4, program)
    assert cuda.moved_bytes == 4 * 100


@pytest.mark.parametrize("size", SIZES)
def test_exchange_all_goes_over_nccl(cuda: Any, size: int) -> None:
    def program(transport: NcclTransport) -> None:
        rank = transport.rank
        for shift in range(1, size + 1):
            source = (rank - shift) % size
            sent = up(message(10 * rank, rank))
            (received,) = transport.exchange_all([(sent, (rank + shift) % size)], [source])
            assert received.get().tobytes() == message(10 * source, source).tobytes()

    on_ranks(size, program)
    assert cuda.moved_bytes == size * sum(10 * rank for rank in range(size))


def test_send_waited_for_at_once_goes_over_nccl(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            transport.send(up(message(100, 1)), 1)()
        else:
            assert transport.receive(0).get().tobytes() == message(100, 1).tobytes()

    on_ranks(2, program)
    assert cuda.moved_bytes == 100


def test_send_not_waited_for_at_once_goes_through_the_host(cuda: Any) -> None:
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
def test_send_is_started_before_any_other_operation(cuda: Any, operation: str) -> None:
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


def test_rank_sends_to_itself(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        transport.send(up(message(9)), 0)()
        assert transport.receive(0).get().tobytes() == message(9).tobytes()

    on_ranks(1, program)


def test_host_and_gpu_messages_keep_their_order(cuda: Any) -> None:
    like_a_header = TransferHeader(TransferMethod.NCCL, 7).encode()
    sent = [message(5, 1), up, message(0, 2), up, like_a_header, message(24, 3), up]

    def program(transport: NcclTransport) -> None:
        waits = []
        for number, content in enumerate(sent):
            content_sent = up(message(number, 9)) if content is up else content
            if transport.rank == 0:
                waits.append(transport.send(content_sent, 1))
                continue
            received = transport.receive(0)
            assert isinstance(received, np.ndarray) == (content is not up)
            host = received.get() if content is up else received
            assert host.tobytes() == (message(number, 9) if content is up else content).tobytes()
        for wait in waits:
            wait()

    on_ranks(2, program)


def test_host_array_is_exchanged_with_a_gpu_array(cuda: Any) -> None:
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


def test_view_goes_over_nccl_after_its_ranks_connect(cuda: Any) -> None:
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


def test_connected_channels_work_in_concurrent_threads(cuda: Any) -> None:
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


def test_received_messages_are_on_the_transports_gpu(cuda: Any) -> None:
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


def test_message_is_sent_after_the_callers_stream_wrote_it(cuda: Any) -> None:
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


def test_message_may_be_released_while_it_is_sent(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            wait = transport.send(up(message(64, 1)), 1)
            wait()
        else:
            time.sleep(0.05)
            assert transport.receive(0).get().tobytes() == message(64, 1).tobytes()

    on_ranks(2, program)


def test_send_never_waited_for_completes_before_its_rank_leaves(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            transport.send(up(message(64, 1)), 1)
        else:
            assert transport.receive(0).get().tobytes() == message(64, 1).tobytes()
        transport.leave("done")

    on_ranks(2, program)


@pytest.mark.parametrize("size", SIZES)
def test_gpu_traffic_is_counted_with_its_headers(cuda: Any, size: int) -> None:
    def program(transport: NcclTransport) -> None:
        transport.traffic.read_and_reset()
        transport.exchange(up(message(100)), transport.rank)
        counted = transport.traffic.read_and_reset()
        assert counted.sent_bytes == 100 + TRANSFER_HEADER_BYTES
        assert counted.sent_messages == 2
        transport.allgather(message(50))
        agreement = transport.traffic.read_and_reset()
        transport.allgather(up(message(1000)))
        counted = transport.traffic.read_and_reset()
        own = dense_bytes(0, size) + (size - 1) * 1000
        assert counted.sent_bytes - own == agreement.sent_bytes - (size - 1) * (
            50 - TRANSFER_HEADER_BYTES
        )
        transport.allreduce(up(np.zeros(1000, np.float32)))
        counted = transport.traffic.read_and_reset()
        assert counted.sent_messages == (3 * rounds(size) if size > 1 else 0)
        assert counted.sent_bytes >= dense_bytes(1000, size)

    on_ranks(size, program)


# ---- tensors of torch


class Tensor:
    """A stand-in for torch's tensors, on an array of the model: what the transport uses of one."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.device = SimpleNamespace(type="cuda", index=array.device.id)
        self.dtype = f"torch.{array.dtype}"

    def data_ptr(self) -> int:
        return self.array.data.ptr

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self.array[part])

    def new_empty(self, length: int) -> Tensor:
        with self.array.cuda.null_streams[self.device.index]:  # torch's
            return Tensor(sys.modules["cupy"].empty(length, self.array.dtype))


@pytest.fixture
def tensor_events(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record torch's events on the model, on another stream than CuPy's current one."""
    recorded = []

    def tensor_event(tensor: Tensor) -> Any:
        event = cuda.null_streams[tensor.device.index].record()
        event.cuda_event = event.ptr
        recorded.append(event)
        return event

    monkeypatch.setattr(nccl_collectives, "tensor_event", tensor_event)
    return recorded


@pytest.mark.parametrize("size", SIZES)
def test_tensors_are_reduced_in_place_after_torchs_stream(
    cuda: Any, tensor_events: list[Any], size: int
) -> None:
    def program(transport: NcclTransport) -> None:
        rank = transport.rank
        array = up(np.arange(2.0 * size) + rank)
        tensor: Any = Tensor(array)
        assert transport.carries(tensor)
        # torch's stream has made it, not CuPy's current one.
        with sys.modules["cupy"].cuda.Stream(non_blocking=True):
            transport.allreduce(tensor)
            transport.broadcast_into(tensor[:2], size - 1)
            received, ends = transport.alltoall(tensor, [2 * r for r in range(size + 1)])
        total = size * np.arange(2.0 * size) + size * (size - 1) / 2
        assert array.get().tolist() == total.tolist()
        assert ends == [2 * r for r in range(size + 1)]
        mine = total[2 * rank : 2 * rank + 2].tolist()
        assert received.array.get().tolist() == mine * size

    on_ranks(size, program)
    assert len(tensor_events) == (3 * size if size > 1 else 1)


def test_reduce_scatter_and_allgather_of_equal_parts_take_one_nccl_call(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    add = fake_cuda.Communicator._add

    def counted(self: Any, shape: tuple[Any, ...], *rest: Any) -> None:
        calls.append(shape[0])
        add(self, shape, *rest)

    monkeypatch.setattr(fake_cuda.Communicator, "_add", counted)

    def program(transport: NcclTransport) -> None:
        array = up(np.arange(6.0))
        transport.barrier()
        calls.clear()
        transport.barrier()
        transport.reduce_scatter(array, [0, 2, 4, 6])
        transport.allgather_into(array, [0, 2, 4, 6])
        assert array.get().tolist() == (3 * np.arange(6.0)).tolist()

    on_ranks(3, program)
    assert sorted(calls) == ["allGather"] * 3 + ["reduceScatter"] * 3
