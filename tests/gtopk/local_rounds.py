"""Ranks as threads that train a small model in rounds of local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression
from gtopk.local_sgd import LocalSGD, nesterov
from gtopk.runtime.world import world

descent = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
GTOPK = Compression.gtopk(density=0.1)
WHOLE = Compression.gtopk(density=1.0)
# Fragments of the network's parameters, which have 54, 9, 36 and 4 values.
PARTS = {2: [[0], [1, 2, 3]], 3: [[0], [1, 3], [2]], 4: [[0], [1], [2], [3]]}


def network(seed: int = 0) -> torch.nn.Module:
    # Its own generator, because the ranks are threads and share the global one.
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    for parameter in model.double().parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def backward(model: torch.nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    model.zero_grad()
    model(x).square().mean().backward()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def weights(model: torch.nn.Module) -> torch.Tensor:
    return flat(model.parameters())


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def on_ranks(size: int, program: Callable[[LocalTransport], Any]) -> list[Any]:
    """Run a program on ranks as threads, each in the world of its transport."""

    def rank(transport: LocalTransport) -> Any:
        with world.entered(transport):
            return program(transport)

    return run_ranks(local_world(size, timeout_seconds=20), rank)


def held(optimizer: Any) -> torch.Tensor:
    """Return this rank's residual, in the order of the parameters; 0 if there is none."""
    (own,) = optimizer.state_dict()["gtopk"]["held"].values()
    return flat(part["residual"] for part in own.values()) if own else torch.zeros(())


def in_fragments(
    overlap: int = 2, compression: Any = None, fragments: int = 3
) -> tuple[torch.nn.Module, Any]:
    """Return a network and its LocalSGD, with a state that has all possible parts."""
    model = network()
    return model, LocalSGD(
        torch.optim.Adam(model.parameters(), lr=0.01),
        4,
        nesterov,
        compression or Compression.gtopk(density=0.1),
        overlap_steps=overlap,
        fragments=fragments,
        residual_decay=0.9,
    )


def train(rank: int, model: torch.nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.step()


def copied(model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Return copies of both states."""
    saved: tuple[Any, Any] = torch.utils._pytree.tree_map(
        lambda part: part.clone() if isinstance(part, torch.Tensor) else part,
        (model.state_dict(), optimizer.state_dict()),
    )
    return saved
