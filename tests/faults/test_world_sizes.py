"""A job resumes with fewer or more ranks without losing any residual."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.held import held

STEPS = 4


class Run(NamedTuple):
    """A rank's residual at the start and at the end, and its other results."""

    first: np.ndarray
    last: np.ndarray
    optimizer: Any
    model: dict[str, torch.Tensor]
    loss: float


def run(transport: LocalTransport, before: Run | None) -> Run:
    """Train for some steps, resuming from another run's end."""
    model = torch.nn.Linear(20, 5, bias=False)
    torch.nn.init.zeros_(model.weight)
    with world.entered(transport):
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
            model.named_parameters(),
            Compression.gtopk(0.1),
        )
        if before:
            model.load_state_dict(before.model)
            optimizer.load_state_dict(copy.deepcopy(before.optimizer))  # torch keeps the tensors
        first = held(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            inputs = torch.randn(16, 20, generator=generator)
            loss = (model(inputs) - inputs[:, :5]).square().mean()
            loss.backward()
            optimizer.step()
        state = optimizer.gather_state()
        return Run(first, held(optimizer), state, model.state_dict(), loss.item())


def summed(parts: list[np.ndarray]) -> np.ndarray:
    return np.sum(parts, axis=0, dtype=np.float64)


def test_resuming_on_fewer_or_more_ranks_keeps_the_residual(threads):
    before: Run | None = None
    held_back: np.ndarray | float = 0.0
    losses = []
    for size in (4, 3, 5):
        ranks = threads(size, lambda transport, before=before: run(transport, before))
        np.testing.assert_allclose(summed([rank.first for rank in ranks]), held_back, atol=1e-6)
        held_back = summed([rank.last for rank in ranks])
        assert np.abs(held_back).max() > 0
        before = ranks[0]
        assert all(torch.equal(rank.model["weight"], before.model["weight"]) for rank in ranks)
        losses.append(before.loss)
    assert losses == sorted(losses, reverse=True)
