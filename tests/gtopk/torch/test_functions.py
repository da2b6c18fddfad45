"""The functions that broadcast parameters, optimizer state and objects, on real ranks."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd
from tests.matrix import some_of


@pytest.mark.parametrize("ranks", some_of([1, 2, 3], 3))
def test_functions_give_every_rank_the_roots_values(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "functions.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every function does as it says") == ranks, job.stdout + job.stderr


def test_broadcast_optimizer_state_has_the_strides_of_its_parameter(ranks) -> None:
    def program(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        momentum = torch.arange(120.0).reshape(weight.shape)
        if rank < 2:  # with unusual strides, for example from a checkpoint
            optimizer.state[weight]["momentum_buffer"] = momentum * (1 - rank)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        found = optimizer.state[weight]["momentum_buffer"]
        assert torch.equal(found, momentum)
        assert found.stride() == weight.stride()

    ranks(3, program)


def test_functions_raise_before_init() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for call in (
        lambda: hvd.broadcast_parameters({"a": torch.ones(1)}, 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
    ):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
