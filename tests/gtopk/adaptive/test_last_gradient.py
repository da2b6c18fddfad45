"""A batch ends with its last gradient, measured with a clock that the test advances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import gtopk.torch as hvd
from gtopk.exchange.buckets import arrays
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import FEATURES, Clock, data, mean_loss, on_ranks, sgd


class Passing(torch.autograd.Function):
    """Let time pass in forward, and twice as much in backward; change nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.now += 2 * ctx.seconds
        return gradient, None, None


def test_batch_time_covers_all_layers_but_not_fetch_or_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(arrays, "time", clock)

    def fetched(samples: list[Any]) -> Any:
        clock.now += 64.0
        return default_collate(samples)

    def program(here: World) -> list[float | None]:
        first, second = torch.nn.Linear(FEATURES, 4).double(), torch.nn.Linear(4, 1).double()
        optimizer = sgd(torch.nn.Sequential(first, second))
        loader = hvd.adapt(DataLoader(data(24), 8, collate_fn=fetched), optimizer)
        take, elapsed = loader._timer.elapsed_seconds, []

        def note() -> float | None:
            elapsed.append(take())
            return elapsed[-1]

        loader._timer.elapsed_seconds = note
        for x, y in loader:
            optimizer.zero_grad()
            between = Passing.apply(first(x), clock, 1.0)
            mean_loss(Passing.apply(second(between), clock, 8.0), y).backward()
            clock.now += 32.0
            optimizer.step()
        return elapsed

    assert on_ranks(1, program) == [[3 * 1.0 + 3 * 8.0] * 3]
