"""Messages of GPUs over MPI: the transport that is opened, and that it keeps all transport laws.

The GPUs are a model, fake_cuda.py, and MPI is real where ranks are processes. What runs on real
GPUs is in test_nccl_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Transport, run_ranks
from collectives.transports import LocalTransport, direct, local_world
from collectives.transports.direct import DirectTransport, open_for_gpus
from collectives.transports.staged import StagedTransport, TransferHeader, TransferMethod
from tests.collectives.fake_cuda import CUDARuntimeError
from tests.matrix import some_of
from tests.programs.of_gpus import up


@pytest.mark.parametrize("ranks", some_of([1, 3], 3))
@pytest.mark.parametrize("route", some_of(["direct", "staged", "none"], "direct"))
def test_direct_and_staged_transports_keep_the_laws_under_mpirun(
    mpirun: Any, route: str, ranks: int
) -> None:
    # "none": the last rank alone has no GPU.
    job = mpirun(ranks, "collectives_direct.py", route)
    assert job.returncode == 0, job.stderr
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of {ranks}: {route}" for rank in range(ranks)]


def opened_transports(
    monkeypatch: pytest.MonkeyPatch, why_staged: Callable[[], str], hosts: list[int]
) -> list[type[Transport]]:
    """Return the transports that ranks open; hosts: each rank's host, named by its first rank."""
    monkeypatch.setattr(direct, "why_staged", why_staged)

    def program(host: LocalTransport) -> type[Transport]:
        own = hosts[host.rank]
        host.neighbours = lambda: [
            rank for rank, host_of_rank in enumerate(hosts) if host_of_rank == own
        ]
        return type(open_for_gpus(host))

    return run_ranks(local_world(len(hosts), 30), program)


def test_each_host_runs_one_trial(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []
    hosts = [0, 0, 2, 2, 2]
    kinds = opened_transports(monkeypatch, lambda: trials.append(1) or "", hosts)
    assert kinds == [DirectTransport] * 5
    assert len(trials) == 2


def test_all_ranks_stage_when_one_host_fails_its_trial(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["", "it died", ""])
    assert opened_transports(monkeypatch, lambda: next(answers), [0, 1, 2]) == [StagedTransport] * 3


def test_no_trial_runs_without_a_gpu(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.gpus = 0
    assert opened_transports(monkeypatch, pytest.fail, [0, 0]) == [LocalTransport] * 2


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_broken_cupy_is_treated_as_missing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(transport: str) -> Any:
        raise error("libcudart is gone")

    monkeypatch.setattr("collectives.transports.gpu.load_cupy", broken)
    assert opened_transports(monkeypatch, pytest.fail, [0, 0]) == [LocalTransport] * 2


def test_transfer_header_of_the_mpi_method_round_trips() -> None:
    header = TransferHeader(TransferMethod.MPI, 17)
    assert TransferHeader.read(header.encode()) == header


def test_staged_transport_over_a_direct_one_uses_its_host(cuda: Any) -> None:
    (host,) = local_world(1)
    assert StagedTransport(DirectTransport(host)).host is host


def test_staged_transport_has_its_hosts_native_bytes(cuda: Any) -> None:
    (host,) = local_world(1)
    host.native_bytes = lambda: 1 << 24
    assert StagedTransport(host).native_bytes() == 1 << 24


def test_failed_gpu_raises_without_waiting(cuda: Any) -> None:
    transport = DirectTransport(local_world(1)[0])
    message = up(np.zeros(3, np.uint8))
    cuda.failed.add(0)
    with pytest.raises(CUDARuntimeError, match="700"):
        transport.send(message, 0)
