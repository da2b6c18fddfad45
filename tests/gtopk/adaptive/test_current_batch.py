"""How an optimizer's step depends on the current batch, or on the lack of one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from gtopk.adaptive.current_batch import CurrentBatch, LearningRate
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.indices import Indices
from tests.gtopk.adaptive.modelled_ranks import on_ranks
from tests.gtopk.adaptive.test_next_world import in_turn


class Script:
    """A weight with an optimizer of rate 1, and the rates of its steps."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1, requires_grad=True)
        self.plain = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer: Any
        self.wrap_anew()

    def wrap_anew(self) -> None:
        self.optimizer = hvd.DistributedOptimizer(self.plain, [("weight", self.weight)])

    def adapted(self, length: int, **options: Any) -> Any:
        """Return a loader with four samples per step; the last step has the remainder."""
        loader = DataLoader(Indices(length), 4 // hvd.size())
        return hvd.adapt(loader, self.optimizer, lr_scaling="linear", **options)

    def step(self, gradient: float = 1.0) -> float:
        """Take a step with this rank's gradient, and return the change of the weight."""
        before = self.weight.item()
        self.weight.grad = None
        (gradient * self.weight).sum().backward()
        self.optimizer.step()
        assert self.optimizer.param_groups[0]["lr"] == 1.0
        return before - self.weight.item()

    def skip(self) -> None:
        """Synchronize without a step, like a GradScaler that skips."""
        self.weight.grad = None
        (float("nan") * self.weight).sum().backward()
        self.optimizer.synchronize()


def test_two_loaders_of_one_optimizer_keep_its_rate() -> None:
    """The last batch handed out is the current one, and the rate follows it."""

    def program(here: World) -> None:
        script = Script()
        first, second = script.adapted(13), script.adapted(15)
        for _ in range(3):
            assert [script.step() for _ in zip(first, second, strict=True)] == [1, 1, 1, 0.75]
            assert [script.step() for _ in zip(second, first, strict=True)] == [1, 1, 1, 0.25]

    on_ranks(1, program)


def test_loader_that_ends_keeps_current_batch_of_another_loader() -> None:
    def program(here: World) -> Any:
        script = Script()
        longer, shorter = script.adapted(9, min_batch=0), iter(script.adapted(4))
        moved = []
        for step, _ in enumerate(longer):
            if step == 0:
                next(shorter)  # this is now the current batch
            if step == 2:  # of one sample, rank 0's
                assert next(shorter, None) is None
            moved.append(script.step(1.0 + 2 * here.rank))
        return [*moved, script.step(1.0 + 2 * here.rank)]

    assert on_ranks(2, program) == [[2.0, 2.0, 0.25, 2.0]] * 2


@pytest.mark.parametrize("steps_in_loop", [True, False])
def test_batch_left_by_break_weights_only_its_own_step(steps_in_loop: bool) -> None:
    """The last batch has one sample, on rank 0, and a quarter of the rate."""

    def program(here: World) -> Any:
        script, moved = Script(), []
        for step, _ in enumerate(script.adapted(13, min_batch=0)):
            if step == 3 and not steps_in_loop:
                break
            moved.append(script.step(1.0 + 2 * here.rank))
            if step == 3:
                break
        while len(moved) < 6:
            moved.append(script.step(1.0 + 2 * here.rank))
        return moved

    assert on_ranks(2, program) == [[2.0, 2.0, 2.0, 0.25, 2.0, 2.0]] * 2


@pytest.mark.parametrize("by", ["gtopk", "a GradScaler"])
def test_skipped_step_after_break_uses_up_the_left_batch(by: str) -> None:
    def program(here: World) -> Any:
        script = Script()
        for step, _ in enumerate(script.adapted(13, min_batch=0)):
            if step == 3:
                break
            script.step()
        if by == "gtopk":
            assert script.step(float("nan")) == 0.0
        else:
            script.skip()
            script.optimizer.zero_grad()
        return [script.step(1.0 + 2 * here.rank) for _ in range(2)]

    assert on_ranks(2, program) == [[2.0, 2.0]] * 2


def test_step_skipped_by_scaler_keeps_weight_of_the_next_batch() -> None:
    def program(here: World) -> Any:
        script = Script()
        for step, _ in enumerate(script.adapted(13, min_batch=0)):
            if step == 3:
                break
            script.skip()
        script.optimizer.zero_grad()
        return [script.step(1.0 + 2 * here.rank) for _ in range(2)]

    assert on_ranks(2, program) == [[0.25, 2.0]] * 2


@pytest.mark.parametrize("is_over", [True, False])
def test_batch_left_in_an_earlier_world_weights_no_step(is_over: bool) -> None:
    """The batch left by the break has one sample, on rank 0, and a quarter of the rate."""

    def leave(loader: Any) -> None:
        for _ in loader:
            break

    def before(here: World, nothing: None) -> Any:
        script = Script()
        loader = script.adapted(1, min_batch=0)
        if is_over:
            leave(loader)
        return script, loader

    def after(here: World, opened: Any) -> Any:
        script, loader = opened
        if not is_over:
            leave(loader)
        return [script.step(1.0 + 2 * here.rank) for _ in range(2)]

    assert in_turn([2, 2], before, after) == [[2.0 if is_over else 0.25, 2.0]] * 2


def test_batch_weights_no_step_of_another_wrapper_of_its_optimizer() -> None:
    def program(here: World) -> None:
        script = Script()
        old = script.optimizer
        for step, _ in enumerate(script.adapted(13)):
            if step == 3:  # a quarter of a global batch
                script.wrap_anew()
                assert script.step() == 1.0
                script.optimizer = old
                assert script.step() == 0.25

    on_ranks(1, program)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("abs", {"micro_batch": 3}),
        ("adaptive-sgd", {}),
        ("hogbatch", {"device_class": "slow", "sizes": {"slow": 3}}),
    ],
)
def test_modes_with_own_step_leave_rate_factor_at_one(mode: str, options: dict[str, Any]) -> None:
    def program(here: World) -> None:
        script = Script()
        factors = []
        for _ in script.adapted(5, mode=mode, **options):
            factors.append(CurrentBatch.of(script.optimizer).factor)
            script.step()
        assert len(factors) == 2
        assert {*factors, CurrentBatch.of(script.optimizer).factor} == {1.0}

    on_ranks(1, program)


def test_all_local_steps_of_a_batch_use_its_rate() -> None:
    def program(here: World) -> list[list[float]]:
        script = Script()
        return [[script.step() for _ in range(2)] for _ in script.adapted(5, mode="adaptive-sgd")]

    assert on_ranks(1, program) == [[[1.0, 1.0], [0.25, 0.25]]]


def test_set_num_samples_after_break_stays_in_force() -> None:
    def program(here: World) -> Any:
        script = Script()
        for _ in script.adapted(4):
            break
        script.optimizer.set_num_samples(3 if here.rank == 0 else 1)
        return [script.step(1.0 + 2 * here.rank) for _ in range(2)]

    assert on_ranks(2, program) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_adamw_steps_before_the_exchange_use_the_rate_of_their_batch(
    size: int,
) -> None:
    """Regression: steps before the exchange used the rate of a full global batch."""

    def program(here: World) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0),
            [("weight", weight)],
            hvd.Compression.gtopk(density=1.0),
            local_residual=False,
        )
        loader = DataLoader(Indices(14), 4 // size)
        adapted = hvd.adapt(loader, optimizer, lr_scaling="linear")
        moved = []
        for _ in chain(range(2), adapted, range(1)):  # the last batch is of half the samples
            before = weight.detach().clone()
            optimizer.zero_grad()
            weight.sum().backward()  # with a gradient of ones, AdamW's steps equal the rate
            optimizer.step()
            moved.append(float((before - weight.detach()).mean()))
        assert optimizer.param_groups[0]["lr"] == 1.0
        return moved

    expected = [1, 1, 1, 1, 1, 0.5, 1]
    assert on_ranks(size, program) == [pytest.approx(expected, rel=1e-3)] * size


def test_closing_an_old_loop_keeps_the_current_batch() -> None:
    def program(here: World) -> Any:
        script = Script()
        loader = script.adapted(9, min_batch=0)
        batches = iter(loader)
        next(batches)
        moved = []
        for step, _ in enumerate(loader):
            if step == 2:
                batches.close()
            moved.append(script.step(1.0 + 2 * here.rank))
        return moved

    assert on_ranks(2, program) == [[2.0, 2.0, 0.25]] * 2


def test_drain_before_a_step_keeps_the_weight_of_its_batch() -> None:
    def program(here: World) -> Any:
        script, moved = Script(), []
        loader = script.adapted(5, min_batch=0)
        for _ in loader:
            loader.drain()
            moved.append(script.step(1.0 + 2 * here.rank))
        return moved

    assert on_ranks(2, program) == [[2.0, 0.25]] * 2


class Twice(torch.optim.SGD):
    """An optimizer that calls its base class's step, so that both run the hooks."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return super().step(closure)


def test_nested_step_scales_the_rate_once() -> None:
    def program(here: World) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([weight], lr=1.0)  # torch adds the hooks to a class with its first object
        optimizer = hvd.DistributedOptimizer(Twice([weight], lr=0.5), [("weight", weight)])
        LearningRate(optimizer, "linear", reference=64).scale(16, None)
        weight.grad = torch.ones(1)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
        return weight.item()

    assert on_ranks(1, program) == [-0.125]


def test_failed_step_restores_the_rate() -> None:
    """Rates that the script has set since are kept."""

    def program(here: World) -> list[float]:
        script = Script()
        fails = [True]

        def fail_once(optimizer: Any, *step: Any) -> None:
            if fails.pop():
                raise MemoryError

        rates = []
        loader = script.adapted(6)
        for _ in chain.from_iterable(iter(loader) for _ in range(2)):
            script.weight.grad = None
            script.weight.sum().backward()
            if len(rates) == 1:  # of the two samples that are left: half the rate
                handle = script.optimizer.register_step_pre_hook(fail_once)
                with pytest.raises(MemoryError):
                    script.optimizer.step()
                handle.remove()
                script.optimizer.param_groups[0]["lr"] = 0.25
            else:
                script.optimizer.step()
            rates.append(script.optimizer.param_groups[0]["lr"])
        return rates

    assert on_ranks(1, program)[0] == [1.0, 0.25, 0.25, 0.25]
