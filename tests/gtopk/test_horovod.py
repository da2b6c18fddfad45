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
            done = mpirun(ranks, PROGRAM, "gtopk", "program", GTOPK_TRANSPORT="mpi")
            (found[ranks],) = set(hashes(done, ranks))
        return found[ranks]

    return weights


def hashes(done: Any, ranks: int) -> list[str]:
    """Return the hashes that the ranks printed, in rank order."""
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^rank (\d+) of (\d+): (\w{64})$", done.stdout, re.MULTILINE)
    assert [(int(r), int(s)) for r, s, _ in sorted(lines)] == [(r, ranks) for r in range(ranks)]
    return [digest for _, _, digest in sorted(lines)]


@pytest.mark.horovod
@pytest.mark.parametrize(("ranks", "ends_first"), [(1, "program"), (2, "gtopk"), (3, "horovod")])
def test_under_mpirun_horovods_ranks_train_as_gtopks_own(
    mpirun, weights_over_mpi, ranks: int, ends_first: str
) -> None:
    done = mpirun(ranks, PROGRAM, "horovod", ends_first)
    assert hashes(done, ranks) == [weights_over_mpi(ranks)] * ranks


@pytest.mark.horovod
@pytest.mark.parametrize(("ranks", "ends_first"), [(1, "gtopk"), (2, "horovod"), (3, "program")])
def test_under_horovodrun_over_gloo_they_train_as_over_mpi(
    horovodrun, weights_over_mpi, ranks: int, ends_first: str
) -> None:
    done = horovodrun(ranks, ["--gloo"], PROGRAM, "horovod", ends_first)
    assert hashes(done, ranks) == [weights_over_mpi(ranks)] * ranks


@pytest.mark.parametrize("lacking", ["horovod", "horovod.torch"])
def test_without_horovod_it_says_what_to_install(monkeypatch, lacking: str) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ImportError, match="HOROVOD_WITH_PYTORCH=1 pip install horovod"):
        gtopk.horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not world.is_initialized()


def test_its_functions_are_those_of_gtopk_torch() -> None:
    for name in ("DistributedOptimizer", "broadcast_optimizer_state"):
        ours, theirs = getattr(gtopk.horovod, name), getattr(gtopk.torch, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
    assert gtopk.horovod.Compression is gtopk.torch.Compression


def test_a_world_that_is_open_is_used() -> None:
    gtopk.torch.init()
    try:
        model = torch.nn.Linear(2, 1)
        optimizer = gtopk.horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(optimizer, torch.optim.SGD)
        assert world.current().transport.name == "local"
    finally:
        gtopk.horovod.shutdown()
