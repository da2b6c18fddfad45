"""Every error that ends a step names the step once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world

LAST = 3


def training_errors(
    loss_at: Callable[[LocalTransport, torch.nn.Linear, int], Any], **options: Any
) -> list[HorovodInternalError]:
    """Return the errors that ended training on two ranks; `loss_at` returns the loss of a step."""

    def train(transport: LocalTransport) -> None:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
            )
            for step in range(LAST + 1):
                optimizer.zero_grad()
                if (loss := loss_at(transport, model, step)) is None:
                    return
                loss.backward()
                optimizer.step()

    def program(transport: LocalTransport) -> Any:
        try:
            return train(transport)
        except HorovodInternalError as error:
            return error

    return run_ranks(local_world(2, timeout_seconds=1), program)


def full_loss(model: torch.nn.Linear) -> torch.Tensor:
    return model(torch.ones(1, 3)).sum()


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.5)], ids=str)
def test_disagreement_error_names_the_step(compression):
    def loss_at(transport: LocalTransport, model: torch.nn.Linear, step: int) -> Any:
        if step == LAST and transport.rank == 1:
            return (torch.ones(1, 3) @ model.weight.T).sum()  # without the bias
        return full_loss(model)

    for error in training_errors(loss_at, compression=compression, missing_gradients="error"):
        text = str(error)
        assert error.operation
        assert "which parameters have a gradient" in text
        assert text.endswith(f"; at step {LAST}")
        assert text.count("at step") == 1


def test_timeout_error_names_the_step():
    def loss_at(transport: LocalTransport, model: torch.nn.Linear, step: int) -> Any:
        if step == LAST and transport.rank == 1:
            time.sleep(2.5)
        return full_loss(model)

    message = str(training_errors(loss_at)[0])
    assert "has waited" in message
    assert message.endswith(f"GTOPK_TIMEOUT (seconds) to wait longer; at step {LAST}")


def test_departed_rank_error_names_the_step():
    def loss_at(transport: LocalTransport, model: torch.nn.Linear, step: int) -> Any:
        return None if step == LAST and transport.rank == 1 else full_loss(model)

    message = str(training_errors(loss_at)[0])
    assert "rank 1 left (its program ended)" in message
    assert message.endswith(f"; at step {LAST}")


def test_divergence_error_names_the_step():
    def loss_at(transport: LocalTransport, model: torch.nn.Linear, step: int) -> Any:
        if step == LAST and transport.rank == 1:
            with torch.no_grad():
                model.bias.add_(1.0)
        return full_loss(model)

    for error in training_errors(loss_at, check_every=1):
        assert "'bias'" in str(error)
        assert str(error).count("at step") == 1
