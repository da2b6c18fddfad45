"""Dense collectives of tensors through torch's process group: gloo in NCCL's place, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collectives import PeerError, Transport, run_ranks
from collectives.errors import MismatchError, PeerTimeoutError
from collectives.transports import gpu, local_world, torch_collectives
from collectives.transports.device_choice import GpuFacts, GpuRoute, RouteChoice
from collectives.transports.nccl import NcclTransport

SIZES = [1, 2, 3]


@pytest.fixture(autouse=True)
def gpus_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each rank say that it has a GPU of its own, and torch's NCCL alone."""

    def facts(host: Transport, device: int | None) -> GpuFacts:
        return GpuFacts(f"GPU-{host.ranks[host.rank]}", cupy="no cupy here", torch_nccl=22703)

    monkeypatch.setattr(gpu, "own_gpu_facts", facts)


def on_ranks(
    size: int, program: Callable[[NcclTransport], Any], timeout_seconds: float = 20
) -> list[Any]:
    def rank(host: Transport) -> Any:
        transport = NcclTransport(
            host, timeout_seconds=timeout_seconds, automatic=True, torch_backend="gloo"
        )
        return program(transport)

    return run_ranks(local_world(size, timeout_seconds), rank)


def test_carries_accepts_tensors_until_the_route_is_staged() -> None:
    def program(transport: NcclTransport) -> None:
        assert transport.carries(torch.zeros(3))
        assert transport.carries(torch.zeros(3, dtype=torch.bfloat16))
        assert not transport.carries(torch.zeros(3, dtype=torch.int16))
        assert not transport.carries(torch.zeros(3, device="meta"))
        transport.allreduce(torch.zeros(3))
        assert transport.choice is not None
        assert transport.choice.route is GpuRoute.TORCH
        assert "dense reductions only: CuPy cannot be used on rank 0" in transport.choice.reason
        assert transport.carries(torch.zeros(3))
        assert not transport.sends_from_device  # nor are sparse messages sent from it
        transport.choice = RouteChoice(GpuRoute.STAGED, "it failed")
        assert not transport.carries(torch.zeros(3))
        transport.leave("done")

    on_ranks(2, program)


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_reduces_tensors_in_place(size: int) -> None:
    reductions = {
        "sum": lambda rows: rows.sum(0),
        "product": lambda rows: rows.prod(0),
        "min": lambda rows: rows.amin(0),
        "max": lambda rows: rows.amax(0),
    }
    dtypes = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def program(transport: NcclTransport) -> None:
        for dtype, (name, reduce) in itertools.product(dtypes, reductions.items()):
            rows = torch.tensor([[rank + 1, 2, rank % 2 + 1, 1] for rank in range(size)])
            tensor = rows[transport.rank].to(dtype, copy=True)
            transport.allreduce(tensor, name)
            assert tensor.tolist() == reduce(rows).tolist(), (dtype, name)
        assert transport.traffic.sent_messages > 0 or size == 1
        transport.leave("done")

    on_ranks(size, program)


@pytest.mark.parametrize("size", SIZES)
def test_tensor_collectives_equal_those_of_host_arrays(size: int) -> None:
    def program(transport: NcclTransport) -> None:
        rank, mine = transport.rank, slice(transport.rank, transport.rank + 2)
        for length in (2 * size, 3 * size + 1, 1, 0):
            bounds = [length * r // size for r in range(size + 1)]
            rows = torch.arange(size * length).reshape(size, length).float()
            own = slice(*bounds[mine])
            reduced = rows[rank].clone()
            transport.reduce_scatter(reduced, bounds)
            assert reduced[own].tolist() == rows.sum(0)[own].tolist()
            gathered = torch.full((length,), 7.0)
            gathered[own] = rows[0][own]
            transport.allgather_into(gathered, bounds)
            assert gathered.tolist() == rows[0].tolist()
            for root in range(size):
                filled = rows[rank].clone()
                transport.broadcast_into(filled, root)
                assert filled.tolist() == rows[root].tolist()
        sizes = [(rank + to) % 3 for to in range(size)]
        numbers = [10.0 * rank + to for to in range(size) for _ in range(sizes[to])]
        received, ends = transport.alltoall(
            torch.tensor(numbers), [0, *itertools.accumulate(sizes)]
        )
        expected = [[10.0 * source + rank] * ((source + rank) % 3) for source in range(size)]
        assert received.tolist() == [*itertools.chain(*expected)]
        assert ends == [0, *itertools.accumulate(map(len, expected))]
        transport.leave("done")

    on_ranks(size, program)


def test_host_arrays_and_subsets_of_ranks_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: NcclTransport) -> None:
        array = np.ones(3)
        transport.allreduce(array)
        assert array.tolist() == [3] * 3
        if transport.rank:
            pair = transport.subset([2, 1])
            tensor = torch.full((2,), float(transport.rank))
            pair.allreduce(tensor)
            assert tensor.tolist() == [3, 3]
        transport.barrier()
        transport.leave("done")

    on_ranks(3, program)


def test_mismatched_tensors_raise_and_the_job_continues() -> None:
    def program(transport: NcclTransport) -> None:
        text = r"rank 1 calls allreduce \(sum\) of float32 \[4\], but rank 0 .* \[3\]"
        with pytest.raises(MismatchError, match=text):
            transport.allreduce(torch.zeros(3 + transport.rank))
        with pytest.raises(TypeError, match=r"NCCL reduces int8, .*; got int16"):
            transport.allreduce(torch.zeros(3, dtype=torch.int16))
        tensor = torch.ones(2)
        transport.allreduce(tensor)
        assert tensor.tolist() == [2, 2]
        transport.leave("done")

    on_ranks(2, program)


def test_waiting_rank_names_the_departed_rank() -> None:
    def program(transport: NcclTransport) -> str:
        transport.allreduce(torch.ones(2))
        if transport.rank == 1:
            transport.announce_departure("it has had enough")
            return ""
        with pytest.raises(PeerError) as caught, transport.operation("the sum of w"):
            transport.allreduce(torch.ones(2))
        return str(caught.value)

    messages = on_ranks(2, program)
    assert (
        messages[0] == "rank 1 left (it has had enough) while rank 0 waited for it in the sum of w"
    )


def test_timeout_inside_the_process_group_breaks_the_group() -> None:
    # Rank 1 agrees to the reduction, and never makes torch's call.
    def program(transport: NcclTransport) -> str:
        transport.allreduce(torch.ones(2))
        collectives = transport._collectives
        assert isinstance(collectives, torch_collectives.TorchCollectives)
        if transport.rank == 0:
            collectives.set_timeout(0.3)
            with pytest.raises(PeerTimeoutError, match=r"rank 0 has waited \d+ s for its peers"):
                collectives.allreduce(torch.ones(2), "sum")
            with pytest.raises(PeerError, match="has waited"):
                transport._collectives.allreduce(torch.ones(2), "sum")
        transport.barrier()
        transport.leave("done")
        return ""

    on_ranks(2, program)


def test_process_group_error_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: NcclTransport) -> None:
        transport.allreduce(torch.ones(2))
        collectives: Any = transport._collectives

        class Broken:
            def allreduce(self, *_: object) -> None:
                raise RuntimeError("ncclUnhandledCudaError\nand a trace")

        collectives._group = Broken()
        text = r"gloo failed on rank \d in an exchange, between it and ranks \[0, 1\]: ncclUnhand.*"
        with pytest.raises(PeerError, match=text):
            transport.allreduce(torch.ones(2))

    on_ranks(2, program)


def test_tensors_are_staged_when_the_store_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("rank 0 cannot serve port 0, where the ranks meet: no port")

    monkeypatch.setattr(torch_collectives, "connect", broken)

    def program(transport: NcclTransport) -> str:
        tensor = torch.ones(2, dtype=torch.bfloat16)
        transport.allreduce(tensor)
        assert tensor.tolist() == [2, 2]
        filled = torch.full((2,), float(transport.rank))
        transport.broadcast_into(filled, 1)
        assert filled.tolist() == [1, 1]
        received, ends = transport.alltoall(torch.tensor([1.0, 2.0]), [0, 1, 2])
        assert received.tolist() == [transport.rank + 1.0] * 2
        assert ends == [0, 1, 2]
        transport.leave("done")
        assert transport.choice is not None
        return transport.choice.reason

    reasons = on_ranks(2, program)
    assert reasons[0] == reasons[1]
    assert "rank 0 could not serve a store for torch's NCCL (rank 0 cannot serve" in reasons[0]
