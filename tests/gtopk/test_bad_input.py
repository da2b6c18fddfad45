"""Mistakes in a step: one clear error on every rank, and no rank hangs."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import torch

from collectives.transports import Transport, local_world
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.local_sgd import LocalSGD
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Adasum
from gtopk.runtime.coordinator import Engine
from gtopk.runtime.world import world
from tests.matrix import some_of


@pytest.mark.parametrize(
    ("launcher", "ranks"), some_of([("mpirun", 3), ("forked", 2)], ("mpirun", 3))
)
def test_every_rank_reports_a_mistake_and_its_rank(request, launcher: str, ranks: int) -> None:
    job = request.getfixturevalue(launcher)(ranks, "mismatch.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every mistake was reported") == ranks, job.stdout + job.stderr


@pytest.mark.parametrize(
    ("launcher", "ranks"), some_of([("mpirun", 3), ("forked", 2)], ("mpirun", 3))
)
def test_ranks_with_different_versions_do_not_start(request, launcher: str, ranks: int) -> None:
    job = request.getfixturevalue(launcher)(ranks, "versions.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("the other version was reported") == ranks, job.stdout + job.stderr


@pytest.mark.parametrize(
    "wrap",
    [
        partial(DistributedOptimizer, compression=Compression.gtopk(0.5)),
        partial(DistributedOptimizer, op=Adasum),
        partial(LocalSGD, inner_steps=2),
    ],
)
def test_loading_none_raises_and_names_the_ways_to_get_a_state(wrap) -> None:
    """As gather_state() returns it on all ranks but one."""
    with world.entered(local_world(1)[0]):
        optimizer = wrap(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
        with pytest.raises(TypeError, match=r"got None; gather_state\(\) returns .* root only"):
            optimizer.load_state_dict(None)


def test_rank_may_leave_early_after_a_disagreement(threads) -> None:
    def work(transport: Transport, all_flags: list[int]) -> list[int] | None:
        if transport.rank == 2:
            time.sleep(0.3)  # rank 0, with nothing to do, has left by now
            transport.send(np.array([7], np.uint8), 1)()
        return transport.receive(2).tolist() if transport.rank == 1 else None

    def program(transport: Transport) -> list[int] | None:
        engine = Engine(transport)
        disputed = engine.submit("disputed", [f"as rank {transport.rank} says"], lambda t, v: None)
        with pytest.raises(HorovodInternalError, match="disputed"):
            disputed.wait()
        result = engine.submit("late", [], work).wait()
        engine.close("it is done")
        return result

    assert threads(3, program) == [None, [7], None]
