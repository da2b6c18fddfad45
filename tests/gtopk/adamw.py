"""A reference in NumPy for AdamW before the exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gtopk.exchange.sampling import SWEEP, times_sampled
from gtopk.optim.distributed import DistributedOptimizer


def value(model: torch.nn.Module, rank: int, step: int, samples: int = 5) -> torch.Tensor:
    """Return the loss of a rank's samples in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return ((model(x) - y) ** 2).mean()


def flat(tensors: Any) -> np.ndarray:
    """Return all values concatenated."""
    return np.concatenate([each.detach().numpy().ravel() for each in tensors])


def distribute(model: torch.nn.Module, compression: Any, **options: Any) -> Any:
    """Return a distributed AdamW with two groups of different rates, betas and decays."""
    first, *others = model.parameters()
    own = ("betas", "lr", "weight_decay", "eps", "amsgrad", "maximize", "kind")
    inner = {name: options.pop(name) for name in own if name in options}
    groups = [
        {"params": [first], "lr": 0.02, "weight_decay": 0.2, "betas": (0.7, 0.9)},
        {"params": others},
    ]
    kind = inner.pop("kind", torch.optim.AdamW)
    optimizer = kind(groups, **{"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, **inner})
    return DistributedOptimizer(optimizer, model.named_parameters(), compression, **options)


def train_scaled(
    model: torch.nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, rank: int, clip: float = 0
) -> None:
    """Take five steps with a GradScaler, following torch's recipe; clip: between the two halves."""
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(5, 6, generator=generator)
        scaler.scale(model(x).square().mean()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def center(optimizer: Any) -> np.ndarray:
    """Return the concatenated parameters, which are equal on all ranks."""
    with optimizer.evaluating():
        return flat(optimizer._parameter_names)


class OneRank:
    """The step of one rank, from its gradient and the shared state of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.first: list[np.ndarray] = []
        self.second: list[np.ndarray] = []
        self.age = 0

    def step(self, optimizer: Any, gradients: list[np.ndarray], share: float) -> np.ndarray:
        """Return share times the step; gradients: means of this rank's samples, by parameter."""
        if not self.first:
            self.first = [np.zeros_like(g) for g in gradients]
            self.second = [np.zeros_like(g) for g in gradients]
        if not share:
            return np.concatenate([np.zeros(g.size) for g in gradients])
        self.age += 1
        steps, number = [], 0
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                g, m, v = (each[number] for each in (gradients, self.first, self.second))
                m[...] = beta1 * m + (1 - beta1) * share * g
                v[...] = beta2 * v + (1 - beta2) * share * g * g
                own = v / (1 - beta2**self.age) / share
                square = self._square(optimizer, parameter, own, beta2)
                unbiased = m / (1 - beta1**self.age)
                steps.append((group["lr"] * unbiased / (np.sqrt(square) + group["eps"])).ravel())
                number += 1
        return np.concatenate(steps)

    def _square(
        self, optimizer: Any, parameter: torch.Tensor, own: np.ndarray, beta2: float
    ) -> np.ndarray:
        if self.ranks == 1:
            return own
        state = optimizer.state[parameter]
        shared = state["shared_exp_avg_sq"].numpy()
        times = times_sampled(int(state["step"]))
        decay = beta2**SWEEP
        own_part = max(2 / (2 + min(times, (1 + decay) / (1 - decay))), 0.1)
        ratio = self.ratios(optimizer)[parameter]
        own = own * ratio.reshape(-1, *[1] * (own.ndim - 1))
        return np.where(shared < 0, own, own_part * own + (1 - own_part) * shared)

    def ratios(self, optimizer: Any) -> dict[torch.Tensor, np.ndarray]:
        """Return R of each parameter, by the rows of its bucket."""
        held = optimizer._reducer.export_state()[0]
        found = {}
        for bucket in optimizer._reducer.planned.bucket_exchanges:
            mean = [optimizer.state[p]["shared_row_squares"].numpy() for p in bucket.parameters]
            own = [held[name]["row_squares"].numpy() * self.ranks for name in bucket.names]
            all_own = np.concatenate(own)
            ratio = np.concatenate(mean).sum() / max(all_own.sum(), 1e-30)
            more = all_own.mean() * 0.02
            for parameter, a, b in zip(bucket.parameters, mean, own, strict=True):
                ratios = (a + ratio * more) / (b + more + 1e-30)
                found[parameter] = np.clip(ratios, 0.25 / self.ranks, 1)
        return found


def gradients_of(model: torch.nn.Module) -> list[np.ndarray]:
    """Return copies of a model's gradients."""
    return [p.grad.detach().numpy().copy() for p in model.parameters()]
