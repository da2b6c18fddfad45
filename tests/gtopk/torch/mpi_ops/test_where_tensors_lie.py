"""Tensors that stay on their device, as on GPUs; gloo replaces NCCL, and ranks are threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, gpu
from collectives.transports.device_choice import GpuFacts, GpuRoute, RouteChoice
from collectives.transports.nccl import NcclTransport
from gtopk.runtime.coordinator import fusion
from gtopk.runtime.coordinator.fusion import ON_GPU, ON_HOST, Finish, all_on_gpu
from gtopk.runtime.world import membership, world
from gtopk.runtime.world.membership import over_gpus

OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": lambda t: hvd.allreduce(t, op=hvd.Sum),
    "grouped": lambda t: hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum)[1],
    "integers": lambda t: hvd.allreduce(t.long() * 3, op=hvd.Average),
    "bools": lambda t: hvd.allreduce(t > 1, op=hvd.Max),
    "broadcast": lambda t: hvd.broadcast(t, 1),
    "allgather": lambda t: hvd.allgather(t[: hvd.rank() + 1]),
    "alltoall": lambda t: hvd.alltoall(t[:2])[:2],
    "reducescatter": lambda t: hvd.reducescatter(t, op=hvd.Sum),
}


@pytest.fixture
def ranks(threads, monkeypatch) -> Callable[..., list[Any]]:
    """Return `ranks(size, program)`; tensors stay on their device, except on ranks `on_host`."""

    def signature(host: Any, device: int | None) -> GpuFacts:
        return GpuFacts(f"GPU-{host.rank}", cupy="no cupy here", torch_nccl=22703)

    monkeypatch.setattr(gpu, "own_gpu_facts", signature)

    def run(
        size: int, program: Callable[[NcclTransport], Any], on_host: tuple[int, ...] = ()
    ) -> list[Any]:
        def rank(host: LocalTransport) -> Any:
            transport = NcclTransport(
                host, timeout_seconds=20, automatic=True, torch_backend="gloo"
            )
            if host.rank in on_host:
                transport.carries = lambda tensor: False
            with world.entered(transport):
                return program(transport)

        return threads(size, rank)

    return run


def results(name: str, rank: int) -> Any:
    return OPERATIONS[name](torch.arange(1.0, 5.0) + rank).tolist()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("on_host", [(), (0,), (0, 1)], ids=["no rank", "rank 0", "all"])
def test_results_are_the_same_wherever_each_ranks_tensors_are(
    ranks, threads, name: str, on_host: tuple[int, ...]
) -> None:
    def reference(host: LocalTransport) -> Any:
        with world.entered(host):
            return results(name, host.rank)

    def program(transport: NcclTransport) -> tuple[Any, bool]:
        found = results(name, transport.rank)
        return found, transport.choice is not None

    expected = threads(2, reference)
    # If one rank's tensor is on the host, all use the host, and NCCL is not even connected.
    assert ranks(2, program, on_host) == [(each, not on_host) for each in expected]


def test_joined_rank_takes_part_on_the_device_of_the_others_tensors(ranks) -> None:
    def program(transport: NcclTransport) -> tuple[list[float], int]:
        total = [0.0]
        if transport.rank:
            handles = [
                hvd.allreduce_async(torch.full((2,), float(transport.rank)), op=op, name=name)
                for name, op in (("a", hvd.Sum), ("b", hvd.Min))
            ]
            total = [hvd.synchronize(handle)[0].item() for handle in handles]
        return total, hvd.join()

    outcomes = ranks(3, program)
    assert [total for total, _ in outcomes] == [[0.0], [3.0, 1.0], [3.0, 1.0]]


def test_operations_on_host_and_device_are_fused_separately(ranks) -> None:
    def program(transport: NcclTransport) -> list[float]:
        transport.carries = lambda tensor: tensor.numel() != 3
        handles = [
            hvd.allreduce_async(torch.ones(length), op=hvd.Sum, name=f"of {length}")
            for length in (2, 3, 4, 3000)
        ]
        return [hvd.synchronize(handle).sum().item() for handle in handles]

    assert ranks(2, program) == [[4.0, 6.0, 8.0, 6000.0]] * 2


def test_in_place_collective_changes_a_device_tensor_and_its_version(ranks) -> None:
    def program(transport: NcclTransport) -> None:
        tensor = torch.ones(4)
        before = tensor._version
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert tensor.tolist() == [2] * 4
        assert tensor._version > before
        before = tensor._version
        assert hvd.broadcast_(tensor.fill_(hvd.rank()), 1) is tensor
        assert tensor.tolist() == [1] * 4
        assert tensor._version > before

    ranks(2, program)


def test_dtypes_unknown_to_nccl_go_through_the_host(ranks) -> None:
    def program(transport: NcclTransport) -> bool:
        found = hvd.allreduce(torch.full((3,), 5, dtype=torch.int16), op=hvd.Sum)
        assert found.tolist() == [10] * 3
        return transport.choice is None

    assert ranks(2, program) == [True, True]


def test_all_on_gpu_ignores_ranks_that_have_joined() -> None:
    assert all_on_gpu([ON_GPU, 0, ON_GPU])
    assert not all_on_gpu([ON_GPU, ON_HOST])
    assert not all_on_gpu([0, 0])


# ---- what the ranks may use, as the world begins


def log_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gtopk"]


def test_gpus_are_counted_without_starting_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", None)  # it would start CUDA
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert membership.visible_gpus() == 2


def test_nccl_is_chosen_when_every_rank_sees_a_gpu(threads, caplog) -> None:
    def program(transport: LocalTransport) -> None:
        over = over_gpus(transport, [1, 8])
        assert isinstance(over, NcclTransport)
        assert over.automatic
        assert (over.name, over.choice) == ("local", None)
        over.on_choice(RouteChoice(GpuRoute.NCCL, "each of 2 ranks has a GPU of its own"))
        over.on_choice(RouteChoice(GpuRoute.NCCL, "each of 2 ranks has a GPU of its own"))

    with caplog.at_level(logging.INFO, "gtopk"):
        threads(2, program)
    text = "GPU messages go over NCCL: each of 2 ranks has a GPU of its own"
    assert log_messages(caplog) == [text]


@pytest.mark.parametrize(
    ("gpu_counts", "environ", "reason"),
    [
        ([4, 0], {}, "rank 1 sees none"),
        ([0, 2, 0], {}, "ranks 0, 2 see none"),
        ([1, 1], {"GTOPK_TRANSPORT": "mpi"}, "selected by GTOPK_TRANSPORT=mpi"),
    ],
)
def test_host_memory_is_chosen_and_logged_when_nccl_is_impossible(
    threads, caplog, monkeypatch, gpu_counts: list[int], environ: dict[str, str], reason: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def program(transport: LocalTransport) -> None:
        assert over_gpus(transport, gpu_counts) is transport

    with caplog.at_level(logging.INFO, "gtopk"):
        threads(len(gpu_counts), program)
    assert log_messages(caplog) == [f"GPU messages go through host memory, over local: {reason}"]


@pytest.mark.parametrize("gpu_counts", [[0, 0], [3]])
def test_nothing_is_logged_without_gpus_or_on_one_rank(threads, caplog, gpu_counts) -> None:
    def program(transport: LocalTransport) -> None:
        assert over_gpus(transport, gpu_counts) is transport

    with caplog.at_level(logging.INFO, "gtopk"):
        threads(len(gpu_counts), program)
    assert log_messages(caplog) == []


@pytest.mark.parametrize(("gpus", "advice"), [(0, ""), (1, "GPU-0; give each rank its own")])
def test_doctor_gets_the_same_gpu_route_on_all_ranks(
    threads, monkeypatch, gpus: int, advice: str
) -> None:
    monkeypatch.setattr(membership, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(gpu, "own_gpu_facts", lambda host, device: GpuFacts("GPU-0", nccl=22703))
    routes = threads(2, lambda transport: membership.choose_gpu_route(transport))
    assert routes[0] == routes[1]
    assert advice in routes[0]
    assert bool(routes[0]) == bool(gpus)


def test_counting_gpus_of_all_ranks_sends_no_further_messages(threads, monkeypatch) -> None:
    def messages(gpus: int) -> list[int]:
        monkeypatch.setattr("gtopk.runtime.world.membership.visible_gpus", lambda: gpus)

        def program(transport: LocalTransport) -> int:
            with world.entered(transport) as here:
                assert isinstance(here.transport, NcclTransport) == bool(gpus)
                return transport.traffic.sent_messages

        return threads(3, program)

    assert messages(0) == messages(2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_single_rank_gets_the_same_results_on_its_gpu(threads, monkeypatch, name) -> None:
    def program(transport: LocalTransport) -> Any:
        with world.entered(transport):
            return OPERATIONS[name](torch.arange(1.0, 5.0)).tolist()

    monkeypatch.setitem(OPERATIONS, "broadcast", lambda t: hvd.broadcast(t, 0))
    expected = threads(1, program)
    # As for a tensor on a GPU.
    monkeypatch.setattr(LocalTransport, "carries", lambda self, tensor: True)
    assert threads(1, program) == expected


# ---- memory of the engine's stream that is used on the program's


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_result_is_recorded_on_the_stream_that_uses_it(ranks, monkeypatch, name) -> None:
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(Finish, "wait", lambda self, made=(): recorded.extend(made))
    ranks(2, lambda transport: results(name, transport.rank))
    assert len(recorded) >= 2
    assert all(isinstance(each, torch.Tensor) for each in recorded)


def test_finish_records_only_gpu_results_on_the_waiting_stream(monkeypatch) -> None:
    waited: list[object] = []
    here = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(fusion, "record_event", lambda device: "the end")
    recorded: list[object] = []
    result = SimpleNamespace(is_cuda=True, record_stream=recorded.append)
    finish = Finish()
    finish.wait([result])
    assert recorded == []  # no work on the host
    with finish.on(torch.device("cpu")):
        pass
    finish.wait([result, torch.zeros(1), np.zeros(1)])
    assert (waited, recorded) == (["the end"], [here])
