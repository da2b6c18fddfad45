"""Messages of GPUs over MPI: which way is opened, and that it keeps the laws of every transport.

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
@pytest.mark.parametrize("way", ["direct", "staged", "none"])
def test_under_mpirun(mpirun: Any, way: str, ranks: int) -> None:
    # "none": the last rank alone has no GPU.
    job = mpirun(ranks, "collectives_direct.py", way)
    assert job.returncode == 0, job.stderr
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} of {ranks}: {way}" for rank in range(ranks)]


def opened(
    monkeypatch: pytest.MonkeyPatch, why_staged: Callable[[], str], hosts: list[int]
) -> list[type[Transport]]:
    """Return what ranks open, on hosts that are called by their first rank."""
    monkeypatch.setattr(direct, "why_staged", why_staged)

    def program(host: LocalTransport) -> type[Transport]:
        own = hosts[host.rank]
        host.neighbours = lambda: [rank for rank, its in enumerate(hosts) if its == own]
        return type(open_for_gpus(host))

    return run_ranks(local_world(len(hosts), 30), program)


def test_every_host_tries_once(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    hosts = [0, 0, 2, 2, 2]
    kinds = opened(monkeypatch, lambda: tried.append(1) or "", hosts)
    assert kinds == [DirectTransport] * 5
    assert len(tried) == 2


def test_where_one_host_cannot_all_ranks_stage(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["", "it died", ""])
    assert opened(monkeypatch, lambda: next(answers), [0, 1, 2]) == [StagedTransport] * 3


def test_without_a_gpu_nothing_is_tried(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.gpus = 0
    assert opened(monkeypatch, pytest.fail, [0, 0]) == [LocalTransport] * 2


@pytest.mark.parametrize("trouble", [ImportError, OSError, RuntimeError])
def test_a_cupy_that_does_not_work_is_as_none(
    monkeypatch: pytest.MonkeyPatch, trouble: type[Exception]
) -> None:
    def broken(transport: str) -> Any:
        raise trouble("libcudart is gone")

    monkeypatch.setattr("collectives.transports.gpu.load_cupy", broken)
    assert opened(monkeypatch, pytest.fail, [0, 0]) == [LocalTransport] * 2


def test_a_header_of_mpis_method_is_read_as_such() -> None:
    header = TransferHeader(TransferMethod.MPI, 17)
    assert TransferHeader.read(header.encode()) == header


def test_staged_over_direct_stages(cuda: Any) -> None:
    (host,) = local_world(1)
    assert StagedTransport(DirectTransport(host)).host is host


def test_one_that_stages_takes_long_vectors_as_its_host_does(cuda: Any) -> None:
    (host,) = local_world(1)
    host.native_bytes = lambda: 1 << 24
    assert StagedTransport(host).native_bytes() == 1 << 24


def test_a_gpu_that_fails_is_not_waited_for(cuda: Any) -> None:
    transport = DirectTransport(local_world(1)[0])
    message = up(np.zeros(3, np.uint8))
    cuda.failed.add(0)
    with pytest.raises(CUDARuntimeError, match="700"):
        transport.send(message, 0)
