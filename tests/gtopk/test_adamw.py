"""A wrapped AdamW computes its steps before the selection."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk import load_latest, save_checkpoint
from gtopk.adaptive.adapt import adapt
from gtopk.compression import Compression
from gtopk.exchange import adamw
from gtopk.exchange.adamw import _pieces, weight_of_own
from gtopk.exchange.bucket_exchange import mean_square_ratio
from gtopk.exchange.sampling import SWEEP
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.samples import LocalClip
from gtopk.reduce_ops import Sum
from gtopk.runtime.world import world
from gtopk.torch import (
    add_process_set,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
)
from tests.gtopk.adamw import (
    OneRank,
    center,
    distribute,
    flat,
    gradients_of,
    train_scaled,
    value,
)
from tests.gtopk.held import held
from tests.gtopk.in_shards import _small_blocks, in_shards
from tests.gtopk.local_rounds import network

__all__ = ["_small_blocks"]

KINDS = [
    Compression.topk,
    Compression.gtopk,
    Compression.oktopk,
    Compression.hierarchical,
    partial(Compression.gtopk, values="int8", wire="packed"),
    partial(Compression.gtopk, dense_vectors=True),
    partial(Compression.gtopk, dense=""),
    in_shards,
]


@pytest.fixture(autouse=True)
def _in_small_blocks(_small_blocks: None) -> None:
    """Use small blocks, so that a small model fills every shard."""


def train(
    optimizer: Any, model: torch.nn.Module, rank: int, steps: range, samples: int = 5
) -> None:
    for step in steps:
        optimizer.zero_grad()
        value(model, rank, step, samples).backward()
        optimizer.step()


def by_rate(step: int) -> float:
    return 0.5**step


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"maximize": True, "eps": 1e-3}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"maximize": True}),
        (torch.optim.Adam, {"decoupled_weight_decay": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ],
)
def test_one_rank_trains_as_the_plain_optimizer(kind, options):
    one, other = network(), network()
    with world.entered(local_world(1)[0]):
        optimizer = distribute(one, Compression.gtopk(0.1), kind=partial(kind, **options))
        plain = distribute(other, Compression.none, kind=partial(kind, **options))._wrapped
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, by_rate) for o in (optimizer, plain)]
        for step in range(8):
            for model, each in ((one, optimizer), (other, plain)):
                each.zero_grad()
                value(model, 0, step).backward()
                each.step()
            for schedule in schedules:
                schedule.step()
    np.testing.assert_allclose(
        flat(one.parameters()), flat(other.parameters()), rtol=1e-10, atol=1e-12
    )


def test_default_dtype_changes_nothing():
    """A count of steps in bfloat16 would stay at 256."""

    def train_once() -> tuple[np.ndarray, float]:
        model = network()
        with world.entered(local_world(1)[0]):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, 0, range(258))
            step_count = optimizer.state_dict()["state"][0]["step"]
        return flat(model.parameters()), step_count.item()

    expected, steps = train_once()
    torch.set_default_dtype(torch.bfloat16)
    try:
        other, same_steps = train_once()
    finally:
        torch.set_default_dtype(torch.float32)
    assert steps == same_steps == 258
    np.testing.assert_array_equal(expected, other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_computes_neighbours_steps_in_one_piece(ranks):
    """Each piece takes ten launches. The meta device stands for a GPU."""
    sizes, rows = [300_000, 0, 7], [100, 1, 1]
    vectors = [torch.zeros(sum(sizes), device="meta") for _ in range(4)]
    ratios = None if ranks == 1 else torch.ones(sum(rows), device="meta")
    ((*whole, by_rows),) = _pieces(vectors, sizes, rows, ratios)
    assert [each.numel() for each in whole] == [300_007] * 4
    shapes = [each.shape for _, *views in by_rows for each in views]
    assert shapes == ([] if ranks == 1 else [(100, 3000), (100, 1), (1, 0), (1, 1), (1, 7), (1, 1)])


def test_steps_in_one_piece_have_the_same_bits(threads, monkeypatch):
    """As on a GPU; neighbours differ in their learning rates, and one has no gradient at first."""

    def program(transport: LocalTransport) -> np.ndarray:
        model = network()
        parameters = list(model.parameters())
        with world.entered(transport):
            groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
            own = torch.optim.AdamW(groups, lr=0.01)
            named = model.named_parameters()
            optimizer = DistributedOptimizer(own, named, Compression.gtopk(0.1))
            for step in range(70):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                parameters[-1].grad = parameters[-1].grad if step > 2 else None
                optimizer.step()
        return flat(parameters)

    expected = threads(2, program)

    def in_one(vectors: list[torch.Tensor], *others: Any) -> Any:
        on_gpu = [SimpleNamespace(device=torch.device("cuda"), split=v.split) for v in vectors]
        ((*_, by_rows),) = _pieces(on_gpu, *others)
        return [(*vectors, by_rows)]

    monkeypatch.setattr(adamw, "_pieces", in_one)
    np.testing.assert_array_equal(threads(2, program), expected)


@pytest.mark.parametrize("size", [1, 2])
def test_second_moment_is_shared_only_with_several_ranks(threads, size):
    def program(transport: LocalTransport) -> tuple[bool, float]:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(2))
            (planned,) = optimizer._reducer.planned.bucket_exchanges
        return planned.exchange.residual.shares_second_moment, mean_square_ratio([planned])

    for shares, ratio in threads(size, program):
        assert shares == (size > 1)
        assert (ratio == 1.0) == (size == 1)


@pytest.mark.parametrize(
    ("times", "decay", "weight"),
    [(0, 0.8, 1.0), (2, 0.8, 0.5), (50, 0.8, 2 / 11), (50, 0.0, 2 / 3), (10**6, 0.9999, 0.1)],
)
def test_own_moment_keeps_weight_where_old_samples_are_forgotten(times, decay, weight):
    assert weight_of_own(times, decay) == pytest.approx(weight)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_center_moves_by_the_mean_of_the_ranks_steps(size, kind):
    """Minus the change of residuals; with unequal samples, a skipped step, and changing rates."""

    def program(transport: LocalTransport) -> list[tuple[np.ndarray, ...]]:
        model, alone, found = network(), OneRank(size), []
        with world.entered(transport):
            optimizer = distribute(model, kind(0.1), groups=1)
            for step in range(9):
                samples = (step + transport.rank) % 4 + (size == 1)  # sometimes none
                total = sum((step + rank) % 4 + (size == 1) for rank in range(size))
                optimizer.set_num_samples(samples)
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
                before, left = center(optimizer), held(optimizer)
                optimizer.zero_grad()
                value(model, transport.rank, step, samples or 1).backward()
                gradients = gradients_of(model)
                if step == 4 and transport.rank == size - 1:
                    next(model.parameters()).grad.fill_(float("inf"))
                    optimizer.set_num_samples(1)
                optimizer.step()
                after, rest = center(optimizer), held(optimizer)
                if step == 4:
                    np.testing.assert_array_equal(before, after)
                    np.testing.assert_array_equal(left, rest)
                    continue
                own = alone.step(optimizer, gradients, samples / total)
                decays = np.concatenate(
                    [
                        np.full(p.numel(), 1 - group["lr"] * group["weight_decay"])
                        for group in optimizer.param_groups
                        for p in group["params"]
                    ]
                )
                found.append((before * decays, left, own, after, rest))
        return found

    for ranks in zip(*run_ranks(local_world(size, 30), program), strict=True):
        before, left, own, after, rest = (np.stack(each) for each in zip(*ranks, strict=True))
        assert (after == after[0]).all()
        np.testing.assert_allclose(
            after[0] - rest.sum(0), before[0] - left.sum(0) - own.sum(0), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_shared_state_is_bit_identical_and_of_the_mean_gradient(threads, op):
    steps = 3 * SWEEP

    def program(transport: LocalTransport) -> tuple[Any, np.ndarray]:
        model, squares = network(), []
        with world.entered(transport):
            options = {"op": Sum} if op == "sum" else {}
            optimizer = distribute(model, Compression.gtopk(0.2), lr=0.0, **options)
            optimizer.param_groups[0]["lr"] = 0.0
            for step in range(steps):
                optimizer.zero_grad()
                value(model, transport.rank, step % 7).backward()
                squares.append(flat(p.grad for p in model.parameters()))
                optimizer.step()
            state = optimizer.state_dict()["state"]
        return state, np.stack(squares)

    first, second = threads(2, program)
    for number, state in first[0].items():
        assert state.keys() == {"step", "shared_exp_avg_sq", "shared_row_squares"}
        assert int(state["step"]) == steps
        for name, tensor in state.items():
            assert torch.equal(tensor, second[0][number][name])
    mean = (first[1] + second[1]) / (1 if op == "sum" else 2)
    shared = flat(state["shared_exp_avg_sq"] for _, state in sorted(first[0].items()))
    # Three samples of each coordinate: each rank's part and the sum are rounded to bfloat16.
    rounding = (np.abs(first[1]) + np.abs(second[1])).max(0) / 256 / (1 if op == "sum" else 2)
    assert (shared**0.5 <= np.abs(mean).max(0) + rounding).all()
    assert (shared**0.5 >= np.abs(mean).min(0) - rounding).all()


def test_skipped_step_leaves_shared_state_and_residuals(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            train(optimizer, model, transport.rank, range(3))
            before = copy.deepcopy(optimizer.state_dict())
            optimizer.zero_grad()
            value(model, transport.rank, 3).backward()
            if transport.rank == 1:
                next(model.parameters()).grad[0, 0] = float("nan")
            optimizer.step()
            after = optimizer.state_dict()
            assert optimizer.skipped_steps == 1
        for number, state in before["state"].items():
            for name, tensor in state.items():
                assert torch.equal(tensor, after["state"][number][name])
        held_before = before["gtopk"]["held"][transport.rank]
        for name, parts in held_before.items():
            for what, tensor in parts.items():
                assert torch.equal(tensor, after["gtopk"]["held"][transport.rank][name][what])

    threads(2, program)


def test_replicas_stay_equal_if_a_grad_scaler_skips_a_step(threads):
    def program(transport: LocalTransport) -> list[np.ndarray]:
        model, history = network().float(), []
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1), scaler=scaler)
            for step in range(5):
                optimizer.zero_grad()
                loss = model(torch.full((2, 6), 1.0 + transport.rank)).square().mean()
                overflows = step == 3 and transport.rank == 1
                scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
                history.append(flat(model.parameters()))
            assert optimizer.skipped_steps == 1
        return history

    for first, second in zip(*threads(2, program), strict=True):
        np.testing.assert_array_equal(first, second)


def test_training_forward_uses_unsent_steps_and_evaluation_the_center(threads):
    def program(transport: LocalTransport) -> np.ndarray:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(4))
            common = flat(model.parameters())
            optimizer.zero_grad()
            loss = value(model, transport.rank, 4)
            unsent = held(optimizer)
            assert unsent.any()
            local = flat(model.parameters())
            np.testing.assert_array_equal(local, common - transport.size * unsent)
            loss.backward()
            saved = model.state_dict()
            np.testing.assert_array_equal(flat(saved.values()), common)
            value(model, transport.rank, 4)
            np.testing.assert_array_equal(flat(model.parameters()), local)
            model.eval()
            value(model, transport.rank, 4)
            np.testing.assert_array_equal(flat(model.parameters()), common)
            model.train()
            value(model, transport.rank, 4)
            with optimizer.evaluating():
                np.testing.assert_array_equal(flat(model.parameters()), common)
                value(model, transport.rank, 4)
                np.testing.assert_array_equal(flat(model.parameters()), common)
            optimizer.step()
            return flat(model.parameters())

    first, second = threads(2, program)
    np.testing.assert_array_equal(first, second)


def test_forward_of_each_module_uses_unsent_steps(threads):
    def program(transport: LocalTransport) -> None:
        one, two = network(), network()
        with world.entered(transport):
            inner = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.1)
            optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(0.1))
            for step in range(3):
                optimizer.zero_grad()
                value(one, transport.rank, step).backward()
                value(two, transport.rank, step + 9).backward()
                optimizer.step()
            common = flat(two.parameters())
            two(torch.zeros(1, 6, dtype=torch.float64))
            assert (flat(two.parameters()) != common).any()

    threads(2, program)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("in_place", [False, True])
def test_forward_of_a_compiled_model_uses_unsent_steps(threads, in_place):
    compiling = threading.Lock()  # torch.compile is not for several threads at a time

    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            if in_place:
                model.compile(backend="eager")
            called = model if in_place else torch.compile(model, backend="eager")
            for step in range(3):
                optimizer.zero_grad()
                with compiling:
                    loss = value(called, transport.rank, step)
                loss.backward()
                optimizer.step()
            common = flat(model.parameters())
            with compiling:
                value(called, transport.rank, 3)
            unsent = transport.size * held(optimizer)
            np.testing.assert_array_equal(flat(model.parameters()), common - unsent)
            assert unsent.any()

    threads(2, program)


def test_parameters_without_a_module_hold_unsent_steps_with_a_warning(threads, caplog):
    def program(transport: LocalTransport) -> np.ndarray:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
        with world.entered(transport):
            inner = torch.optim.AdamW([weight], lr=0.1)
            optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(0.1))
            for step in range(3):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + transport.rank)
                slope = torch.randn(50, generator=generator, dtype=torch.float64)
                (weight * slope).sum().backward()
                optimizer.step()
            with optimizer.evaluating():
                common = weight.detach().numpy().copy()
            unsent = transport.size * held(optimizer)
            np.testing.assert_array_equal(weight.detach().numpy(), common - unsent)
            assert unsent.any()
        return common

    with caplog.at_level(logging.WARNING, "gtopk"):
        first, second = threads(2, program)
    np.testing.assert_array_equal(first, second)
    assert sum("evaluating()" in record.message for record in caplog.records) == 1


def test_local_residual_false_keeps_the_center_in_forward(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1), local_residual=False)
            train(optimizer, model, transport.rank, range(3))
            common = flat(model.parameters())
            value(model, transport.rank, 3)
            np.testing.assert_array_equal(flat(model.parameters()), common)

    threads(2, program)


def test_model_state_loaded_in_mid_step_becomes_the_center(threads):
    def program(transport: LocalTransport) -> None:
        model, other = network(), network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(3))
            value(model, transport.rank, 3)
            model.load_state_dict(other.state_dict())
            with optimizer.evaluating():
                np.testing.assert_array_equal(flat(model.parameters()), flat(other.parameters()))

    threads(2, program)


def test_broadcast_in_mid_step_sends_the_center(threads):
    def program(transport: LocalTransport) -> np.ndarray:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(4))
            common = flat(model.parameters())
            value(model, transport.rank, 4)
            broadcast_parameters(model.named_parameters(), root_rank=1)
            np.testing.assert_array_equal(flat(model.parameters()), common)
            train(optimizer, model, transport.rank, range(4, 6))
        return flat(model.parameters())

    first, second = threads(2, program)
    np.testing.assert_array_equal(first, second)


def test_parameters_perturbed_and_restored_before_the_step_are_allowed(threads):
    """As SAM does, whose second backward pass is at other values."""

    def program(transport: LocalTransport) -> np.ndarray:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            for step in range(4):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                with torch.no_grad():
                    before = [parameter.clone() for parameter in model.parameters()]
                    for parameter in model.parameters():
                        parameter.add_(0.05 * parameter.grad.sign())
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                with torch.no_grad():
                    for parameter, earlier in zip(model.parameters(), before, strict=True):
                        parameter.copy_(earlier)
                optimizer.step()
        return flat(model.parameters())

    np.testing.assert_array_equal(*threads(2, program))


def test_changing_a_parameter_with_unsent_steps_raises_with_its_name(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(3))
            optimizer.zero_grad()
            value(model, transport.rank, 3).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
            message = (
                rf"rank {transport.rank}: parameter '.*' was changed between a forward pass and"
            )
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()

    threads(2, program)


def test_two_optimizers_of_one_model_keep_replicas_equal(threads):
    def program(transport: LocalTransport) -> np.ndarray:
        model = network()
        with world.entered(transport):
            both = [distribute(model, Compression.gtopk(0.1)) for _ in range(2)]
            for step in range(6):
                for optimizer in both:
                    optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                both[step % 2].step()
            with both[0].evaluating(), both[1].evaluating():
                return flat(model.parameters())

    np.testing.assert_array_equal(*threads(2, program))


def test_outer_optimizer_may_call_step_with_a_closure(threads):
    """When its hooks run, the gradients are still the last step's reduced steps."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    def program(transport: LocalTransport) -> np.ndarray:
        with world.entered(transport):
            model, other = network(), network()
            outer = Outer(distribute(model, Compression.gtopk(0.5)))
            direct = distribute(other, Compression.gtopk(0.5))
            for step in range(3):

                def closure(step: int = step) -> torch.Tensor:
                    outer.inner.zero_grad()
                    loss = value(model, transport.rank, step)
                    loss.backward()
                    return loss

                outer.step(closure)
                direct.zero_grad()
                value(other, transport.rank, step).backward()
                direct.step()
            np.testing.assert_array_equal(flat(model.parameters()), flat(other.parameters()))
            return flat(model.parameters())

    threads(2, program)


@pytest.mark.parametrize("steps", [0, 2])
def test_plain_adamw_state_loaded_after_steps_continues_as_plain_adamw(steps):
    """Also a state without a step, as of a new run."""
    one, other = network(), network()
    with world.entered(local_world(1)[0]):
        optimizer = distribute(one, Compression.gtopk(0.1))
        plain = distribute(other, Compression.none)._wrapped
        for step in range(steps):
            plain.zero_grad()
            value(other, 0, step).backward()
            plain.step()
        train(optimizer, one, 0, range(3))
        one.load_state_dict(other.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        train(optimizer, one, 0, range(10, 14))
        for step in range(10, 14):
            plain.zero_grad()
            value(other, 0, step).backward()
            plain.step()
    np.testing.assert_allclose(
        flat(one.parameters()), flat(other.parameters()), rtol=1e-10, atol=1e-12
    )


def test_param_group_with_amsgrad_added_later_raises():
    model, late = network(), torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    with world.entered(local_world(1)[0]):
        optimizer = distribute(model, Compression.gtopk(0.1))
        optimizer.add_param_group({"params": [late], "amsgrad": True})
        with pytest.raises(ValueError, match="amsgrad=True needs"):
            train(optimizer, model, 0, range(1))


def test_copied_or_pickled_model_holds_no_unsent_steps(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(3))
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                value(other, transport.rank, 3)
                np.testing.assert_array_equal(flat(other.parameters()), flat(model.parameters()))

    threads(2, program)


def test_learning_rate_changed_between_backward_and_step_is_used(threads):
    """As if it had changed before; early buckets are exchanged again."""

    def program(transport: LocalTransport, early: bool) -> np.ndarray:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1), bucket_bytes=1)
            for step in range(4):
                optimizer.zero_grad()
                rates = [group["lr"] * 0.5 for group in optimizer.param_groups]
                loss = value(model, transport.rank, step)
                if not early:
                    loss.backward()
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                if early:
                    loss.backward()
                optimizer.step()
            return center(optimizer)

    early, late = (threads(2, lambda t, e=early: program(t, e)) for early in (True, False))
    np.testing.assert_array_equal(early, late)


def test_step_hooks_run_once_per_step(threads):
    def program(transport: LocalTransport) -> None:
        model, calls = network(), []
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            optimizer.register_step_pre_hook(lambda *call: calls.append("before"))
            optimizer.register_step_post_hook(lambda *call: calls.append("after"))
            train(optimizer, model, transport.rank, range(2))
        assert calls == ["before", "after"] * 2

    threads(2, program)


def test_resumed_run_is_bit_identical(threads):
    def program(transport: LocalTransport, steps: range, saved: Any = None) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            if saved is not None:
                model.load_state_dict(saved[transport.rank][0])
                optimizer.load_state_dict(saved[transport.rank][1])
            train(optimizer, model, transport.rank, steps)
            state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        return state

    half = threads(2, lambda t: program(t, range(SWEEP + 5)))
    resumed = threads(2, lambda t: program(t, range(SWEEP + 5, SWEEP + 9), half))
    uninterrupted = threads(2, lambda t: program(t, range(SWEEP + 9)))
    for (model, optimizer), (other, other_optimizer) in zip(resumed, uninterrupted, strict=True):
        np.testing.assert_array_equal(flat(model.values()), flat(other.values()))
        for number, state in optimizer["state"].items():
            for name, tensor in state.items():
                assert torch.equal(tensor, other_optimizer["state"][number][name])


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 2), (2, 3), (1, 2), (2, 1)])
def test_run_resumes_from_a_checkpoint_folder_on_any_number_of_ranks(
    threads, tmp_path, saved, loaded
):
    """Bit-identically on as many ranks; on others, the residuals keep their sum."""

    def run(transport: LocalTransport, save_at: int | None) -> tuple[np.ndarray, np.ndarray]:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            begin = 0
            if save_at is None:
                begin = load_latest(tmp_path, model, optimizer).step
            unsent = held(optimizer) if begin else np.zeros(0)
            for step in range(begin, 8):
                train(optimizer, model, transport.rank, range(step, step + 1))
                if step + 1 == save_at:
                    save_checkpoint(tmp_path, model, optimizer, step=step + 1)
                    unsent = held(optimizer)
        return flat(model.parameters()), unsent

    uninterrupted = threads(saved, lambda transport: run(transport, 5))
    resumed = threads(loaded, lambda transport: run(transport, None))
    np.testing.assert_allclose(
        sum(unsent for _, unsent in resumed), sum(unsent for _, unsent in uninterrupted), atol=1e-15
    )
    assert saved == 1 or sum(abs(unsent).sum() for _, unsent in uninterrupted) > 0
    for weights, _ in resumed:
        np.testing.assert_array_equal(weights, resumed[0][0])
        if saved == loaded:
            np.testing.assert_array_equal(weights, uninterrupted[0][0])


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (2, 3), (3, 1)])
def test_residuals_keep_their_sum_on_another_number_of_ranks(threads, saved, loaded):
    def program(transport: LocalTransport, state: Any = None) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
                before = held(optimizer)
                train(optimizer, model, transport.rank, range(5, 7))
                return before, optimizer.state_dict()["state"][0]["step"], flat(model.parameters())
            train(optimizer, model, transport.rank, range(5))
            gathered = optimizer.gather_state()
            return (copy.deepcopy(model.state_dict()), gathered), held(optimizer)

    parts = threads(saved, program)
    state, left = parts[0][0], sum(each[1] for each in parts)
    for each in state[1]["gtopk"]["held"].values():
        assert all("shared_exp_avg_sq" not in of for of in each.values())  # once, not by rank
    resumed = threads(loaded, lambda t: program(t, state))
    np.testing.assert_allclose(sum(each[0] for each in resumed), left, rtol=0, atol=1e-15)
    assert {int(each[1]) for each in resumed} == {7}
    assert all((each[2] == resumed[0][2]).all() for each in resumed)


@pytest.mark.parametrize("kind", [Compression.gtopk, Compression.shards], ids=["gtopk", "shards"])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (2, 3), (4, 3), (3, 2), (3, 1)])
def test_step_length_is_the_learning_rate_on_any_number_of_ranks(
    threads, tmp_path, kind, saved, loaded
):
    """With constant gradients, a step of AdamW is its rate, on however many ranks."""
    rate, compression = 0.01, kind(1, 32) if kind is Compression.shards else kind(1.0)

    def program(transport: LocalTransport, given: Any = None) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
        slopes = torch.linspace(0.5, 2, parameter.numel(), dtype=torch.float64).view_as(parameter)
        with world.entered(transport):
            inner = torch.optim.AdamW([parameter], lr=rate, weight_decay=0)
            named = [("p", parameter)]
            optimizer = DistributedOptimizer(inner, named, compression, local_residual=False)
            if given == "folder":
                load_latest(tmp_path, None, optimizer)
            elif given is not None:
                optimizer.load_state_dict(copy.deepcopy(given))
            moved = []
            for _ in range(SWEEP + 5 if given is None else 12):
                before = parameter.detach().clone()
                optimizer.zero_grad()
                (parameter * slopes).sum().backward()
                optimizer.step()
                moved.append((before - parameter.detach()).numpy() / rate)
            if given is None:
                save_checkpoint(tmp_path, None, optimizer, step=0)
                return optimizer.gather_state()
        return np.array(moved)

    (state, *_) = threads(saved, lambda transport: program(transport))
    for given in (state, "folder"):
        for moved in threads(loaded, lambda transport, given=given: program(transport, given)):
            np.testing.assert_allclose(moved.mean((1, 2)), 1, rtol=0, atol=0.02)


def test_one_rank_continues_from_the_moments_of_a_plain_adamw():
    one, other = network(), network()
    with world.entered(local_world(1)[0]):
        plain = distribute(other, Compression.none)._wrapped
        train(plain, other, 0, range(5))
        optimizer = distribute(one, Compression.gtopk(0.1))
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        one.load_state_dict(other.state_dict())
        train(optimizer, one, 0, range(5, 9))
        train(plain, other, 0, range(5, 9))
    np.testing.assert_allclose(
        flat(one.parameters()), flat(other.parameters()), rtol=1e-10, atol=1e-12
    )


def test_moments_of_a_plain_adamw_become_shared_state(threads):
    plain_model = network()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.05, betas=(0.8, 0.95))
    steps = 113  # the next step samples one coordinate of each of these small parameters
    train(plain, plain_model, 0, range(steps))
    state = plain.state_dict()

    def program(transport: LocalTransport) -> None:
        model = network()
        model.load_state_dict(plain_model.state_dict())
        with world.entered(transport):
            inner = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.95))
            optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(1.0))
            optimizer.load_state_dict(copy.deepcopy(state))
            optimizer.zero_grad()
            value(model, 0, 5).backward()
            optimizer.step()
            for number, part in optimizer.state_dict()["state"].items():
                before = state["state"][number]["exp_avg_sq"] / (1 - 0.95**steps)
                assert (part["shared_exp_avg_sq"] != before).sum() == 1  # only the sampled entry
                assert int(part["step"]) == steps + 1

    threads(2, program)


def test_float32_state_of_bfloat16_parameters_stays_float32(threads):
    def program(transport: LocalTransport) -> None:
        model = network().to(torch.bfloat16)
        with world.entered(transport):
            inner = torch.optim.AdamW(model.parameters(), lr=0.05)
            optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(0.1))

            def step() -> None:
                optimizer.zero_grad()
                model(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().sum().backward()
                optimizer.step()

            step()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(copy.deepcopy(saved))
            for number, state in optimizer.state_dict()["state"].items():
                for name, tensor in state.items():
                    assert tensor.dtype == torch.float32
                    assert torch.equal(tensor, saved["state"][number][name])
            step()

    threads(2, program)


def test_broadcast_optimizer_state_sends_shared_state(threads):
    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(local_world(1)[0]):
            before = distribute(model, Compression.gtopk(0.1))
            train(before, model, 0, range(2))
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            if transport.rank == 0:
                state = before.state_dict()["state"]
                for part in state.values():
                    part["step"].fill_(SWEEP)
                    part["shared_exp_avg_sq"].fill_(0.25)
                optimizer.state.update(
                    {p: dict(state[n]) for n, p in enumerate(model.parameters())}
                )
            broadcast_optimizer_state(optimizer, 0)
            train(optimizer, model, transport.rank, range(1))
            return optimizer.state_dict()["state"]

    first, second = threads(2, program)
    for number, state in first.items():
        assert int(state["step"]) == SWEEP + 1
        assert (state["shared_exp_avg_sq"] == 0.25).any()  # entries that were not sampled since
        for name, tensor in state.items():
            assert torch.equal(tensor, second[number][name])


def test_auto_compression_in_dense_mode_keeps_replicas_equal(threads):
    """On threads nothing beats dense: all is sent, and no residual remains."""

    def program(transport: LocalTransport) -> np.ndarray:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.auto(density=1.0, steps=10))
            train(optimizer, model, transport.rank, range(4))
            assert all("shared_exp_avg_sq" in state for state in optimizer.state.values())
            return flat(model.parameters())

    first, second = threads(2, program)
    np.testing.assert_array_equal(first, second)


def test_frozen_layer_keeps_its_values_in_forward_passes(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(3))
            model[0].requires_grad_(False)
            before = flat(model[0].parameters())
            optimizer.zero_grad()
            value(model, transport.rank, 3).backward()
            np.testing.assert_array_equal(flat(model[0].parameters()), before)
            optimizer.step()
            np.testing.assert_array_equal(flat(model[0].parameters()), before)

    threads(2, program)


@pytest.mark.parametrize("size", [1, 2])
def test_l2_decay_moves_no_parameter_without_a_gradient_on_any_rank(threads, size):
    def program(transport):
        with world.entered(transport):
            used, idle = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            model = torch.nn.ModuleDict({"used": used, "idle": idle})
            # eps=0: a step without a gradient would be 0 / 0, and the whole step void.
            plain = torch.optim.Adam(model.parameters(), lr=1e-2, eps=0.0, weight_decay=0.1)
            named = model.named_parameters()
            optimizer = DistributedOptimizer(plain, named, Compression.gtopk(0.25))
            history = []
            for step in range(6):
                optimizer.zero_grad()
                layers = [used, idle] if step < 2 else [used]
                sum(layer(torch.ones(4, 8)).square().mean() for layer in layers).backward()
                optimizer.step()
                assert not optimizer.last_step.skipped
                history.append(idle.weight.detach().clone())
            return history

    for weights in threads(size, program):
        assert not torch.equal(weights[0], weights[1])
        assert all(torch.equal(weight, weights[1]) for weight in weights[2:])


def test_joined_rank_keeps_the_shared_state_of_the_others(threads):
    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            train(optimizer, model, transport.rank, range(2))
            if transport.rank == 0:
                train(optimizer, model, 0, range(2, 5))
            join()
            return optimizer.state_dict()["state"], sum(np.abs(held(optimizer)))

    (first, left), (second, rest) = threads(2, program)
    assert left > 0
    assert rest > 0
    for number, state in first.items():
        assert int(state["step"]) == 5
        for name, tensor in state.items():
            assert torch.equal(tensor, second[number][name])


class CustomStepAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (CustomStepAdamW, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.AdamW, {"adam_steps": "after"}),
        (torch.optim.AdamW, {"compression": Compression.hierarchical(0.1, inside="dense")}),
    ],
)
def test_adam_steps_after_the_exchange_are_warned_of(make, options, threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                make(model.parameters(), lr=0.1),
                model.named_parameters(),
                **{"compression": Compression.gtopk(0.1), **options},
            )
            train(optimizer, model, transport.rank, range(2))

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    assert any("after compression loses accuracy" in each.message for each in caplog.records)


def test_adamw_steps_before_the_exchange_are_not_warned_of(threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.5))
            train(optimizer, model, transport.rank, range(2))

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    assert not any("loses accuracy" in each.message for each in caplog.records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "use amsgrad=False, or adam_steps='after'"),
        ({"adam_steps": "behind"}, "adam_steps must be one of before, after; got 'behind'"),
        ({"adam_steps": "after", "local_residual": True}, "local_residual=True is for Adam"),
    ],
)
def test_unsupported_adam_options_raise(options, message):
    with world.entered(local_world(1)[0]), pytest.raises(ValueError, match=re.escape(message)):
        distribute(network(), Compression.gtopk(0.1), **options)


def test_local_residual_with_sgd_raises():
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    with (
        world.entered(local_world(1)[0]),
        pytest.raises(ValueError, match="the residual of other optimizers"),
    ):
        DistributedOptimizer(inner, compression=Compression.gtopk(0.1), local_residual=True)


def test_sparse_gradients_raise_as_in_plain_adam(threads):
    def program(transport: LocalTransport) -> None:
        table = torch.nn.Embedding(20, 3, sparse=True)
        with world.entered(transport):
            inner = torch.optim.AdamW(table.parameters(), lr=0.1)
            optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(0.1))
            table(torch.tensor([1, 2])).sum().backward()
            with pytest.raises(RuntimeError, match="does not support sparse gradients"):
                optimizer.step()

    threads(2, program)


def test_adaptive_sgd_mode_steps_with_plain_adamw(threads):
    """It exchanges models: what ranks agree on is no step of AdamW."""

    def program(transport: LocalTransport) -> None:
        model = network()
        x = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.5))
            adapted = adapt(loader, optimizer, mode="adaptive-sgd")
            for (batch,) in adapted:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            assert all("exp_avg" in state for state in optimizer.state.values())
            adapted.close() if hasattr(adapted, "close") else None

    threads(2, program)


def test_gradients_synchronized_and_cleared_change_no_state(threads):
    """After `synchronize` and `zero_grad`, residuals and shared state are as before."""

    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            train(optimizer, model, transport.rank, range(3))
            before, left = copy.deepcopy(optimizer.state_dict()), held(optimizer)
            optimizer.zero_grad()
            value(model, transport.rank, 3).backward()
            optimizer.synchronize()
            between = optimizer.state_dict()
            optimizer.zero_grad()
            np.testing.assert_array_equal(held(optimizer), left)
            for number, state in between["state"].items():
                for name, tensor in state.items():
                    assert torch.equal(tensor, before["state"][number][name])
            for number, state in optimizer.state_dict()["state"].items():
                for name, tensor in state.items():
                    assert torch.equal(tensor, before["state"][number][name])

    threads(2, program)


def test_global_clip_norm_on_one_rank_clips_before_the_moments():
    one, other = network(), network()
    with world.entered(local_world(1)[0]):
        optimizer = distribute(one, Compression.gtopk(0.1), global_clip_norm=0.1)
        plain = distribute(other, Compression.none)._wrapped
        for step in range(5):
            train(optimizer, one, 0, range(step, step + 1))
            plain.zero_grad()
            value(other, 0, step).backward()
            norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            assert norm > 0.1
            plain.step()
    np.testing.assert_allclose(
        flat(one.parameters()), flat(other.parameters()), rtol=1e-5, atol=1e-6
    )


def test_global_clip_norm_estimates_the_norm_of_the_mean_gradient(threads):
    """Noise of four ranks makes a rank's own gradient twice as long as their mean."""

    def program(transport: LocalTransport) -> tuple[np.ndarray, float, float]:
        weight = torch.nn.Parameter(torch.zeros(200, 100))
        common = torch.randn(200, 100, generator=torch.Generator().manual_seed(0)) * 0.2
        with world.entered(transport):
            inner = torch.optim.AdamW([weight], lr=0.0)
            optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(0.1))
            total = torch.zeros_like(weight)
            for step in range(6):
                noise = torch.Generator().manual_seed(100 + 10 * step + transport.rank)
                weight.grad = common + torch.randn(200, 100, generator=noise)
                total = weight.grad.clone()
                optimizer.step()
            ratio = mean_square_ratio(optimizer._reducer.planned.bucket_exchanges)
        return total.numpy(), float(total.norm()), ratio

    ranks = threads(4, program)
    mean = np.linalg.norm(sum(gradient for gradient, *_ in ranks) / 4)
    for _, norm, ratio in ranks:
        assert norm > 1.8 * mean
        assert norm * ratio**0.5 == pytest.approx(mean, rel=0.05)
        clip = LocalClip([torch.ones(4)], None, allowed_mean=0.5, ratio=ratio)
        assert clip.factor(0.25, 0.25) * 2 * ratio**0.5 == pytest.approx(0.5)


def test_step_without_an_exchange_raises(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            value(model, transport.rank, 3).backward()
            with optimizer.skip_synchronize(), pytest.raises(ValueError, match="synchronize"):
                optimizer.step()

    threads(2, program)


def test_rank_outside_the_process_set_steps_with_plain_adamw(threads, monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def program(transport: LocalTransport) -> None:
        one, other = network(), network()
        with world.entered(transport):
            ranks = add_process_set([0, 1])
            optimizer = distribute(one, Compression.gtopk(0.2), process_set=ranks)
            train(optimizer, one, transport.rank, range(3))
            if transport.rank == 2:
                plain = distribute(other, Compression.none)._wrapped
                train(plain, other, 2, range(3))
                np.testing.assert_array_equal(flat(one.parameters()), flat(other.parameters()))

    threads(3, program)


def test_loss_scale_changes_nothing(threads):
    """Gradients times 1024, unscaled by a GradScaler after the exchange, give the same result."""

    def program(transport: LocalTransport, scale: float) -> np.ndarray:
        model = network().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=True)
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2), scaler=scaler)
            train_scaled(model, optimizer, scaler, transport.rank)
        return flat(model.parameters())

    first, second = (threads(2, lambda t, s=scale: program(t, s)) for scale in (1.0, 1024.0))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("enabled", [True, False])
def test_clipping_after_a_grad_scalers_unscale_raises(threads, enabled):
    def program(transport: LocalTransport) -> None:
        model = network().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2), scaler=scaler)
            with pytest.raises(ValueError, match=r"(changed|scaled down) between .* step\(\)"):
                train_scaled(model, optimizer, scaler, transport.rank, clip=1e-3)

    threads(2, program)


def test_clipping_in_a_step_pre_hook_raises(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            optimizer.register_step_pre_hook(
                lambda *call: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) and None
            )
            with pytest.raises(ValueError, match=r"(changed|scaled down) between .* step\(\)"):
                train(optimizer, model, transport.rank, range(1))

    threads(2, program)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_model_is_trained_with_a_warning(threads, caplog):
    scripted = [torch.jit.script(network()) for _ in range(2)]  # not in several threads at a time

    def program(transport: LocalTransport) -> np.ndarray:
        model = scripted[transport.rank]
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            train(optimizer, model, transport.rank, range(4))
            with optimizer.evaluating():
                return flat(model.parameters())

    np.testing.assert_array_equal(*threads(2, program))
    assert sum("evaluating()" in record.message for record in caplog.records) == 1


def test_clipping_between_synchronize_and_step_raises(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            optimizer.zero_grad()
            value(model, transport.rank, 3).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with optimizer.skip_synchronize(), pytest.raises(ValueError, match="global_clip_norm="):
                optimizer.step()

    threads(2, program)
