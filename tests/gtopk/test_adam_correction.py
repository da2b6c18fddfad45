"""Adam before the selection: its steps are selected, exchanged and kept as residuals."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk import LocalSGD
from gtopk.adaptive.adapt import adapt
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Sum
from gtopk.runtime.world import world
from tests.gtopk.adamw import flat, train_scaled, value
from tests.gtopk.held import held
from tests.gtopk.local_rounds import network

BETAS = (0.8, 0.95)
gtopk = partial(Compression.gtopk, adam_correction=BETAS)
KINDS = [
    Compression.topk,
    Compression.gtopk,
    Compression.oktopk,
    Compression.hierarchical,
    partial(Compression.gtopk, values="int8", wire="packed"),
    partial(Compression.gtopk, dense_vectors=True),
]


def distribute(model: torch.nn.Module, compression: Any, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    return DistributedOptimizer(inner, model.named_parameters(), compression, **options)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, betas=BETAS, weight_decay=0.1)


class LocalAdam:
    """A rank's torch Adam, with its own steps on a model that does not change."""

    def __init__(self, gradient: np.ndarray) -> None:
        self._at = torch.nn.Parameter(torch.zeros(gradient.size, dtype=torch.float64))
        self._adam = torch.optim.Adam([self._at], lr=1.0, betas=BETAS)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        before = self._at.detach().clone()
        self._at.grad = torch.from_numpy(gradient.copy())
        self._adam.step()
        return (before - self._at.detach()).numpy()


@pytest.mark.parametrize(
    "compression",
    [gtopk(1.0), gtopk(0.1, dense=""), Compression.auto(density=1.0, adam_correction=BETAS)],
    ids=str,
)
def test_density_1_on_one_rank_equals_adamw(compression):
    one, other = network(), network()
    with world.entered(local_world(1)[0]):
        optimizers = distribute(one, compression), adamw(other)
        for step in range(30):
            for model, optimizer in zip((one, other), optimizers, strict=True):
                optimizer.zero_grad()
                value(model, 0, step).backward()
                optimizer.step()
    np.testing.assert_allclose(
        flat(one.parameters()), flat(other.parameters()), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_mean_or_sum_of_the_ranks_adam_steps_is_conserved(size, kind, op):
    def program(transport: LocalTransport) -> list[tuple[np.ndarray, ...]]:
        model, alone, steps = network(), None, []
        with world.entered(transport):
            optimizer = distribute(
                model,
                kind(0.1, adam_correction=BETAS),
                **({"op": Sum} if op == "sum" else {}),
            )
            for step in range(6):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                gradient = flat(p.grad for p in model.parameters())
                alone = alone or LocalAdam(gradient)
                before = held(optimizer)
                optimizer.synchronize()
                update = flat(p.grad for p in model.parameters())
                own = alone.step(gradient) / (size if op == "mean" else 1)
                with optimizer.skip_synchronize():
                    optimizer.step()
                steps.append((before, own, update, held(optimizer)))
        return steps

    for ranks in zip(*run_ranks(local_world(size, 30), program), strict=True):
        before, own, updates, after = (np.stack(column) for column in zip(*ranks, strict=True))
        assert (updates == updates[0]).all()
        scale = np.abs(before).max() + np.abs(own).max()
        np.testing.assert_allclose(
            updates[0] + after.sum(0), before.sum(0) + own.sum(0), rtol=0, atol=1e-12 * scale
        )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_adam_steps_are_weighted_by_samples(threads, reduction):
    """Weights change between steps; a rank without samples takes no step, and its moments stay."""
    sizes = [(1, 3), (2, 2), (0, 4), (3, 1)]

    def program(transport: LocalTransport) -> list[tuple[np.ndarray, ...]]:
        model, steps = network(), []
        first = second = np.zeros(sum(p.numel() for p in model.parameters()))
        age = 0
        with world.entered(transport):
            optimizer = distribute(model, gtopk(0.1))
            for step, of_ranks in enumerate(sizes):
                samples = of_ranks[transport.rank]
                optimizer.set_num_samples(samples, reduction)
                optimizer.zero_grad()
                mean = value(model, transport.rank, step, samples or 1)
                (mean * samples if reduction == "sum" else mean).backward()
                gradient = flat(p.grad for p in model.parameters())
                before = held(optimizer)
                optimizer.synchronize()
                update = flat(p.grad for p in model.parameters())
                own, share = np.zeros_like(gradient), samples / sum(of_ranks)
                if samples:
                    gradient /= samples if reduction == "sum" else 1
                    age += 1
                    first = BETAS[0] * first + (1 - BETAS[0]) * share * gradient
                    second = BETAS[1] * second + (1 - BETAS[1]) * share * gradient**2
                    unbiased = second / (1 - BETAS[1] ** age) / share
                    own = first / (1 - BETAS[0] ** age) / (np.sqrt(unbiased) + 1e-8)
                with optimizer.skip_synchronize():
                    optimizer.step()
                steps.append((before, own, update, held(optimizer)))
        return steps

    for ranks in zip(*threads(2, program), strict=True):
        before, own, updates, after = (np.stack(column) for column in zip(*ranks, strict=True))
        np.testing.assert_allclose(
            updates[0] + after.sum(0), before.sum(0) + own.sum(0), rtol=0, atol=1e-12
        )


def test_loss_scale_changes_nothing(threads):
    """Gradients times 1024, unscaled by a GradScaler after the exchange, give the same result."""

    def program(transport: LocalTransport, scale: float) -> np.ndarray:
        model = network().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=True)
        with world.entered(transport):
            optimizer = distribute(model, gtopk(0.2), scaler=scaler)
            train_scaled(model, optimizer, scaler, transport.rank)
        return flat(model.parameters())

    first, second = (threads(2, lambda t, s=scale: program(t, s)) for scale in (1.0, 1024.0))
    np.testing.assert_array_equal(first, second)


def test_moments_of_two_equal_ranks_load_on_one_rank(threads):
    """Two ranks with equal gradients, loaded on one, which continues as if always alone."""

    def program(transport: LocalTransport, steps: range, state: Any = None) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, gtopk(1.0))
            if state is not None:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
            for step in steps:
                optimizer.zero_grad()
                value(model, 0, step).backward()
                optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.gather_state()}
            return state, flat(model.parameters())

    (both, _), _ = threads(2, lambda t: program(t, range(5)))
    ((_, resumed),) = threads(1, lambda t: program(t, range(5, 9), both))
    ((_, alone),) = threads(1, lambda t: program(t, range(9)))
    np.testing.assert_allclose(resumed, alone, rtol=1e-10, atol=1e-12)


def test_parameter_unfrozen_later_has_its_own_adam_step_count(threads):
    """In a bucket with others; after a checkpoint without moments, all parameters are new."""

    def program(transport: LocalTransport) -> None:
        one, other = network(), network()
        with world.entered(transport):
            optimizers = distribute(one, gtopk(1.0)), adamw(other)
            for step in range(9):
                for model, optimizer in zip((one, other), optimizers, strict=True):
                    optimizer.zero_grad()
                    model[0].weight.requires_grad_(step >= 5)
                    value(model, 0, step).backward()
                    optimizer.step()
        np.testing.assert_allclose(
            flat(one.parameters()), flat(other.parameters()), rtol=1e-10, atol=1e-12
        )

    threads(2, program)


def test_moments_missing_from_a_checkpoint_start_at_zero():
    plain, one, other = network(), network(), network()
    with world.entered(local_world(1)[0]):
        trained = distribute(plain, Compression.gtopk(1.0))
        for step in range(7):
            trained.zero_grad()
            value(plain, 0, step).backward()
            trained.step()
        optimizers = distribute(one, gtopk(1.0)), adamw(other)
        optimizers[0].load_state_dict(trained.state_dict())
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model.load_state_dict(plain.state_dict())
            for step in range(4):
                optimizer.zero_grad()
                value(model, 0, step).backward()
                optimizer.step()
    np.testing.assert_allclose(
        flat(one.parameters()), flat(other.parameters()), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    ("betas", "kind", "message"),
    [
        (0.9, TypeError, "must be Adam's betas, such as (0.9, 0.999), or None, got 0.9"),
        ((0.9,), TypeError, "must be Adam's betas"),
        ((0.9, "x"), TypeError, "adam_correction must be a number, got 'x'"),
        ((0.9, 1.0), ValueError, "betas must lie in [0, 1), got (0.9, 1.0)"),
    ],
)
def test_invalid_betas_raise(betas, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Compression.gtopk(0.1, adam_correction=betas)


def test_betas_may_be_a_list():
    assert Compression.gtopk(0.1, adam_correction=[0, 0.5]).adam_correction == (0.0, 0.5)


def test_momentum_and_adam_correction_together_raise():
    with pytest.raises(ValueError, match="give momentum_correction or adam_correction"):
        gtopk(0.1, momentum_correction=0.9)


def test_adam_correction_with_dense_sums_inside_nodes_raises():
    with pytest.raises(ValueError, match="use inside='picks'"):
        Compression.hierarchical(0.1, inside="dense", adam_correction=BETAS)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (
            partial(torch.optim.AdamW, lr=0.1),
            {},
            "AdamW would compute them again: use torch.optim.SGD",
        ),
        (
            partial(torch.optim.RMSprop, lr=0.1),
            {},
            "RMSprop would compute them again: use torch.optim.SGD",
        ),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.5), {}, "momentum=0, not 0.5"),
        (partial(torch.optim.SGD, lr=0.1), {"local_clip_norm": 1.0}, "local_clip_norm is not for"),
    ],
)
def test_adam_correction_with_an_incompatible_optimizer_or_option_raises(inner, options, message):
    with world.entered(local_world(1)[0]), pytest.raises(ValueError, match=re.escape(message)):
        DistributedOptimizer(inner(network().parameters()), compression=gtopk(0.1), **options)


def test_local_sgd_and_abs_refuse_adam_correction():
    with world.entered(local_world(1)[0]):
        inner = torch.optim.SGD(network().parameters(), lr=0.1)
        with pytest.raises(ValueError, match="LocalSGD exchanges changes of the model"):
            LocalSGD(inner, 2, compression=gtopk(0.1))
        model = network()
        samples = torch.utils.data.TensorDataset(torch.zeros(8, 6), torch.zeros(8, 4))
        loader = torch.utils.data.DataLoader(samples, batch_size=4)
        with pytest.raises(ValueError, match="modes 'abs', 'hogbatch'"):
            adapt(loader, distribute(model, gtopk(0.1)), mode="abs")
