"""The functions that spread parameters, optimizer state and objects, on real ranks."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd
from tests.matrix import some_of


@pytest.mark.parametrize("ranks", some_of([1, 2, 3], 3))
def test_every_rank_ends_up_with_what_the_root_has(mpirun, ranks: int) -> None:
    done = mpirun(ranks, "functions.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every function does as it says") == ranks, done.stdout + done.stderr


def test_each_function_needs_init() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for call in (
        lambda: hvd.broadcast_parameters({"a": torch.ones(1)}, 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
    ):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
