"""gTop-k under Horovod trains bit-identically under each of Horovod's launchers."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
import torch

import gtopk.horovod
import gtopk.torch
from gtopk.runtime.world import world

PROGRAM = "horovod_digits.py"


@pytest.fixture(scope="module")
def weights_over_mpi(mpirun) -> Any:
    """Return `weights(ranks)`: the hash of the weights after training without Horovod."""
    found: dict[int, str] = {}

    def weights(ranks: int) -> str:
        if ranks not in found:
            job = mpirun(ranks, PROGRAM, "gtopk", "program", GTOPK_TRANSPORT="mpi")
            (found[ranks],) = set(hashes(job, ranks))
        return found[ranks]

    return weights


def hashes(job: Any, ranks: int) -> list[str]:
    """Return the hashes that the ranks printed, in rank order."""
    assert job.returncode == 0, job.stderr
    lines = re.findall(r"^rank (\d+) of (\d+): (\w{64})$", job.stdout, re.MULTILINE)
    assert [(int(r), int(s)) for r, s, _ in sorted(lines)] == [(r, ranks) for r in range(ranks)]
    return [digest for _, _, digest in sorted(lines)]


@pytest.mark.horovod
@pytest.mark.parametrize(("ranks", "ends_first"), [(1, "program"), (2, "gtopk"), (3, "horovod")])
def test_horovod_ranks_under_mpirun_train_as_gtopks_own(
    mpirun, weights_over_mpi, ranks: int, ends_first: str
) -> None:
    job = mpirun(ranks, PROGRAM, "horovod", ends_first)
    assert hashes(job, ranks) == [weights_over_mpi(ranks)] * ranks


@pytest.mark.horovod
@pytest.mark.parametrize(("ranks", "ends_first"), [(1, "gtopk"), (2, "horovod"), (3, "program")])
def test_horovod_ranks_under_horovodrun_over_gloo_train_as_over_mpi(
    horovodrun, weights_over_mpi, ranks: int, ends_first: str
) -> None:
    job = horovodrun(ranks, ["--gloo"], PROGRAM, "horovod", ends_first)
    assert hashes(job, ranks) == [weights_over_mpi(ranks)] * ranks


@pytest.mark.parametrize("lacking", ["horovod", "horovod.torch"])
def test_missing_horovod_raises_with_an_install_command(monkeypatch, lacking: str) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ImportError, match="HOROVOD_WITH_PYTORCH=1 pip install horovod"):
        gtopk.horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not world.is_initialized()


def test_horovod_functions_have_the_signatures_of_gtopk_torch() -> None:
    for name in ("DistributedOptimizer", "broadcast_optimizer_state"):
        ours, theirs = getattr(gtopk.horovod, name), getattr(gtopk.torch, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
    assert gtopk.horovod.Compression is gtopk.torch.Compression


def test_existing_world_is_used() -> None:
    gtopk.torch.init()
    try:
        model = torch.nn.Linear(2, 1)
        optimizer = gtopk.horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(optimizer, torch.optim.SGD)
        assert world.current().transport.name == "local"
    finally:
        gtopk.horovod.shutdown()
