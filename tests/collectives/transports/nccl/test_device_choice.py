"""The choice of transport for GPUs' messages: from facts alone, and on ranks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from collectives import Transport, run_ranks
from collectives.transports import gpu, local_world, nccl
from collectives.transports.device_choice import (
    GpuFacts,
    GpuRoute,
    RouteChoice,
    choose,
    fall_back_after_test,
)
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import StagedTransport
from tests.collectives import fake_cuda
from tests.programs.of_gpus import device, up

NCCL, TORCH, STAGED = GpuRoute


def fact(device: str, **others: Any) -> GpuFacts:
    """Return the facts of a rank that has everything, except as given in `others`."""
    return GpuFacts(device, **{"nccl": 22703, "torch_nccl": 22605, **others})


@pytest.mark.parametrize(
    ("facts", "route", "reason"),
    [
        ([fact("GPU-a")], NCCL, "each of 1 ranks has a GPU of its own; NCCL 2.27.3 through CuPy"),
        ([fact("GPU-a"), fact("GPU-b")], NCCL, "each of 2 ranks"),
        # Two hosts, on which the GPUs have the same bus.
        (
            [
                fact("0000:07:00.0 on the host of rank 0"),
                fact("0000:07:00.0 on the host of rank 1"),
            ],
            NCCL,
            "each of 2 ranks",
        ),
        # MIG instances of one GPU have UUIDs of their own.
        ([fact("GPU-1-mig-a"), fact("GPU-1-mig-b")], NCCL, "each of 2 ranks"),
        (
            [fact("GPU-a"), fact("GPU-b"), fact("GPU-a")],
            STAGED,
            "ranks [0, 2] share GPU-a; give each rank its own: "
            "torch.cuda.set_device(hvd.local_rank())",
        ),
        (
            [fact("GPU-a"), fact("", problem="it sees 0 GPUs and would use number 1")],
            STAGED,
            "rank 1 has no GPU (it sees 0 GPUs and would use number 1)",
        ),
        (
            [fact("GPU-a"), fact("GPU-b", checks=True)],
            STAGED,
            "NCCL's messages cannot be checked (GTOPK_CHECK_MESSAGES=1)",
        ),
        (
            [fact("GPU-a"), fact("GPU-b", cupy="no module named cupy", nccl=0)],
            TORCH,
            "each of 2 ranks has a GPU of its own; NCCL 2.26.5 of torch, dense reductions only: "
            "CuPy cannot be used on rank 1 (no module named cupy)",
        ),
        (
            [fact("GPU-a", nccl=22703), fact("GPU-b", nccl=22904)],
            TORCH,
            "dense reductions only: CuPy's NCCL is 2.27.3 on rank 0 and 2.29.4 on rank 1",
        ),
        ([fact("GPU-a"), fact("GPU-b", nccl=0)], TORCH, "CuPy's NCCL is missing on rank 1"),
        (
            [fact("GPU-a", nccl=0, torch_nccl=0), fact("GPU-b", nccl=0)],
            STAGED,
            "CuPy's NCCL is missing on rank 0, and torch's NCCL is missing on rank 0",
        ),
        (
            [fact("GPU-a", cupy="gone"), fact("GPU-b", cupy="gone", torch_nccl=21805)],
            STAGED,
            "CuPy cannot be used on rank 0 (gone), and torch's NCCL is 2.26.5 on rank 0 and "
            "2.18.5 on rank 1",
        ),
    ],
)
def test_route_follows_from_the_facts_of_all_ranks(
    facts: list[GpuFacts], route: GpuRoute, reason: str
) -> None:
    choice = choose(facts, range(len(facts)))
    assert choice.route is route
    assert reason in choice.reason


def test_route_reason_names_ranks_of_the_world() -> None:
    choice = choose([fact("GPU-a"), fact("GPU-a")], [4, 7])
    assert choice.reason.startswith("ranks [4, 7] share GPU-a")


def test_route_that_failed_its_test_on_any_rank_falls_back_to_staged() -> None:
    choice = RouteChoice(NCCL, "each has one")
    assert fall_back_after_test(choice, ["", ""], [0, 1]) is choice
    assert fall_back_after_test(choice, ["", "unhandled system error"], [0, 1]) == RouteChoice(
        STAGED, "NCCL failed its start-up test on rank 1: unhandled system error"
    )


# ---- choices of ranks, on a model of their GPUs


def automatic(host: Transport, **options: Any) -> NcclTransport:
    return NcclTransport(host, timeout_seconds=20, automatic=True, **options)


def total(transport: Transport) -> list[float]:
    array = up(np.full(3, transport.rank + 1.0))
    transport.allreduce(array)
    return array.get().tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_own_gpus_send_over_nccl_from_the_first_array(cuda: Any, size: int) -> None:
    choices: list[RouteChoice] = []

    def program(host: Transport) -> bool:
        transport = automatic(host, on_choice=choices.append)
        assert transport.choice is None
        with device(host.rank):
            assert total(transport) == [size * (size + 1) / 2] * 3
        transport.leave("done")
        return transport.sends_from_device

    assert run_ranks(local_world(size), program) == [True] * size
    assert {choice.route for choice in choices} == {NCCL}
    assert len(cuda.communicators) == size


def test_host_arrays_open_no_gpu_and_send_no_facts(cuda: Any) -> None:
    def program(host: Transport) -> int:
        transport = automatic(host)
        array = np.full(3, host.rank + 1.0)
        assert transport.traffic.sent_messages == 0
        transport.allreduce(array)
        assert array.tolist() == [3] * 3
        transport.leave("done")
        return len(cuda.communicators)

    assert run_ranks(local_world(2), program) == [0, 0]
    assert cuda.opened == set()


def test_ranks_that_share_a_gpu_stage_with_a_reason(cuda: Any) -> None:
    choices: list[RouteChoice] = []

    def program(host: Transport) -> None:
        transport = automatic(host, on_choice=choices.append)
        with device(5):
            assert total(transport) == [3] * 3
            assert total(transport) == [3] * 3
        assert not transport.sends_from_device
        transport.leave("done")

    run_ranks(local_world(2), program)
    assert [choice.route for choice in choices] == [STAGED] * 2
    assert "ranks [0, 1] share 0000:05:00.0" in choices[0].reason
    assert cuda.communicators == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("id", "on rank 0: PeerError: rank 0 could not create NCCL's id (NCCL_ERROR 3)"),
        ("making", "on rank 0: PeerTimeoutError: rank 0 has waited"),
        ("sum", "on rank 1: PeerError: NCCL sums 1 to 3 over the ranks to 0 instead of 6"),
    ],
)
def test_all_ranks_stage_when_nccl_fails_its_test_on_one_rank(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    choices: list[RouteChoice] = []
    module = sys.modules["cupy.cuda.nccl"]
    make = module.NcclCommunicator
    monkeypatch.setattr(nccl, "_START_TEST_SECONDS", 0.5)

    def broken_id() -> bytes:
        raise fake_cuda.NcclError(3)

    def make_except_on_rank_1(size: int, unique_id: bytes, rank: int) -> Any:
        if rank == 1:
            raise fake_cuda.NcclError(2)
        return make(size, unique_id, rank)

    class WrongSum(nccl.CupyCollectives):
        def sum_of_ranks(self) -> list[float]:
            found = super().sum_of_ranks()
            return [0.0] * 4 if self._host.rank == 1 else found

    if fault == "id":
        monkeypatch.setattr(module, "get_unique_id", broken_id)
    elif fault == "making":
        monkeypatch.setattr(module, "NcclCommunicator", make_except_on_rank_1)
    else:
        monkeypatch.setattr(nccl, "CupyCollectives", WrongSum)

    def program(host: Transport) -> None:
        transport = automatic(host, on_choice=choices.append)
        with device(host.rank):
            assert total(transport) == [6] * 3
        assert not transport.sends_from_device
        transport.leave("done")

    run_ranks(local_world(3, 20), program)
    assert len(set(choices)) == 1
    assert choices[0].route is STAGED
    assert choices[0].reason.startswith(f"NCCL failed its start-up test {reason}")
    if fault == "sum":
        assert [c.aborted for c in cuda.communicators] == [True] * 3


def test_connecting_raises_when_another_rank_runs_another_operation(cuda: Any) -> None:
    def program(host: Transport) -> None:
        transport = automatic(host)
        with device(host.rank):
            if host.rank == 0:
                transport.host.allgather(np.frombuffer(b"another operation's", np.uint8))
            else:
                text = r"rank 0 does not take part in connecting the GPUs: .*GTOPK_TRANSPORT=staged"
                with pytest.raises(RuntimeError, match=text):
                    transport.connect(1)

    run_ranks(local_world(2, 10), program)


def test_staged_bootstrap_is_used_when_nccl_cannot_be(cuda: Any) -> None:
    # Such as an MPI that is CUDA-aware.
    class Direct(StagedTransport):
        reduced = 0

        def allreduce(self, array: Any, reduction: str = "sum") -> None:
            self.reduced += 1
            super().allreduce(array, reduction)

    def program(host: Transport) -> int:
        under = Direct(host)
        transport = automatic(under)
        with device(0):
            assert total(transport) == [3] * 3
        transport.leave("done")
        return under.reduced

    assert run_ranks(local_world(2), program) == [1, 1]


def test_subset_of_ranks_chooses_its_own_route(cuda: Any) -> None:
    # All three share two GPUs; two of them have one each.
    choices: list[str] = []

    def program(host: Transport) -> tuple[bool, bool]:
        transport = automatic(host, on_choice=lambda choice: choices.append(choice.reason))
        alone = True
        with device(host.rank // 2):
            assert total(transport) == [6] * 3
            if host.rank:
                pair = transport.subset([1, 2])
                assert total(pair) == [3] * 3
                alone = pair.sends_from_device
        transport.barrier()
        transport.leave("done")
        return transport.sends_from_device, alone

    assert run_ranks(local_world(3), program) == [(False, True)] * 3
    assert sum("share" in reason for reason in choices) == 3


def test_missing_cupy_is_a_gpu_fact_and_no_error(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    facts = gpu.own_gpu_facts(local_world(1)[0], None)
    assert (facts.device, facts.nccl, facts.torch_nccl) == ("", 0, 0)
    assert "pip install cupy-cuda12x" in facts.cupy
    assert facts.problem == f"it sees 0 GPUs and would use number 0; {facts.cupy}"
