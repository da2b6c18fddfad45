"""A wrapped optimizer keeps the user's class, and shares its groups and state."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gtopk
from collectives.transports import local_world
from gtopk.local_sgd import LocalSGD
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.wrapped.wrapping import Wrapping, wrap
from gtopk.reduce_ops import Adasum
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, layers

KINDS: dict[str, Callable[[Any], Any]] = {
    "average": DistributedOptimizer,
    "adasum": lambda optimizer: DistributedOptimizer(optimizer, op=Adasum),
    "local_sgd": lambda optimizer: LocalSGD(optimizer, inner_steps=2),
}


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.5)


def step(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Wrap an inner optimizer without own groups or state, like timm's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:  # without torch's __init__
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class OptimizerWithExtraArguments(torch.optim.SGD):
    """An optimizer with extra arguments, like apex's fused ones."""

    strict: bool | None = None

    def zero_grad(self) -> None:
        super().zero_grad(set_to_none=False)

    def load_state_dict(self, state_dict: Any, strict: bool = False) -> None:
        super().load_state_dict(state_dict)
        self.strict = strict


def test_param_groups_and_state_are_shared_with_the_wrapped_optimizer():
    inner = sgd()
    optimizer = wrap(inner, Wrapping)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    (parameter,) = inner.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert inner.param_groups is optimizer.param_groups
    assert inner.state[parameter]["momentum_buffer"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("loading", ["inner", "optimizer"])
def test_param_groups_and_state_stay_shared_after_load_state_dict(loading: str) -> None:
    inner = sgd()
    optimizer = wrap(inner, Wrapping)
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    (inner if loading == "inner" else optimizer).load_state_dict(saved)
    assert inner.param_groups is optimizer.param_groups
    assert inner.param_groups[0]["lr"] == 0.25
    step(optimizer)
    (parameter,) = inner.param_groups[0]["params"]
    assert inner.state[parameter]["momentum_buffer"].tolist() == [1.5, 1.5]
    assert inner.state is optimizer.state
    assert parameter.tolist() == [-1.375, -1.375]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [False, True])
def test_nested_inner_optimizer_steps_at_the_scheduled_rate(kind: str, load: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    with world.entered(local_world(1)[0]):
        optimizer = KINDS[kind](Lookahead(torch.optim.SGD([parameter], lr=1.0)))
        optimizer.zero_grad()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if load:
            optimizer.load_state_dict(optimizer.state_dict())
        rates = []
        optimizer.register_step_pre_hook(lambda *step: rates.append(scheduler.get_last_lr()[0]))
        for expected in (1.0, 0.5, 0.25):
            step(optimizer)
            assert optimizer.inner.param_groups[0]["lr"] == expected
            scheduler.step()
    assert rates == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["wl", "swl", "wsl", "wls", "w", "sw", "ws"])
def test_step_hooks_run_once_per_step_after_the_exchange(
    threads: Callable[..., Any], kind: str, order: str
) -> None:
    """It is wrapped (w), loaded (l) and given to a scheduler (s) in several orders."""

    def program(transport: Any) -> list[Any]:
        parameter = torch.nn.Parameter(torch.zeros(()))
        optimizer: Any = torch.optim.SGD([parameter], lr=1.0)
        called: list[Any] = []
        with world.entered(transport):
            for action in order:
                if action == "w":
                    optimizer = KINDS[kind](optimizer)
                elif action == "s":
                    torch.optim.lr_scheduler.StepLR(optimizer, 100)
                else:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.register_step_pre_hook(lambda *step: called.append(parameter.grad.item()))
            optimizer.register_step_post_hook(lambda *step: called.append("after"))
            for _ in range(2):
                parameter.grad = torch.tensor(float(transport.rank))
                optimizer.step()
        return called

    own = [[0.0, "after"] * 2, [1.0, "after"] * 2]
    assert threads(2, program) == ([[0.5, "after"] * 2] * 2 if kind == "average" else own)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_state_gets_its_parameters_strides(kind: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    with world.entered(local_world(1)[0]):
        optimizer = KINDS[kind](torch.optim.SGD([weight], lr=1.0, momentum=0.5))
        for size in (0, 1, 2):  # LocalSGD's third is in the middle of a round
            weight.grad = size * torch.arange(120.0).reshape(weight.shape)
            optimizer.step()
        saved = torch.utils._pytree.tree_map(
            lambda part: part.contiguous().clone() if torch.is_tensor(part) else part,
            optimizer.state_dict(),
        )
        momentum = optimizer.state[weight]["momentum_buffer"].clone()
        optimizer.load_state_dict(saved)
        tensors = [optimizer.state[weight]["momentum_buffer"]]
        assert torch.equal(tensors[0], momentum)
        if kind == "local_sgd":
            tensors += [
                *next(iter(optimizer._fragments)).center,
                optimizer.outer.state[weight]["momentum_buffer"],
            ]
    assert all(tensor.stride() == weight.stride() for tensor in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_and_load_state_dict_pass_on_extra_arguments(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    with world.entered(local_world(1)[0]):
        optimizer = KINDS[kind](OptimizerWithExtraArguments([parameter], lr=1.0))
        step(optimizer)
        optimizer.zero_grad()
        assert parameter.grad.item() == 0.0
        assert not inspect.signature(optimizer.zero_grad).parameters
        optimizer.load_state_dict(optimizer.state_dict(), strict=True)
        assert optimizer.strict
        optimizer = KINDS[kind](torch.optim.SGD([parameter], lr=1.0))
        step(optimizer)
        optimizer.zero_grad(set_to_none=False)
        assert parameter.grad.item() == 0.0
        optimizer.zero_grad()
        assert parameter.grad is None
        assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters


def test_argument_that_is_no_optimizer_raises():
    for argument in (None, [torch.nn.Parameter(torch.zeros(1))]):
        for call in (lambda it: wrap(it, Wrapping), lambda it: gtopk.ramp(it, steps=1)):
            with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
                call(argument)


def test_wrapping_twice_raises():
    with pytest.raises(ValueError, match="distributed already"):
        wrap(wrap(sgd(), Wrapping), Wrapping)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, pickle.dumps])
def test_distributed_optimizer_cannot_be_copied_or_pickled(copy_of):
    with world.entered(local_world(1)[0]):
        optimizer = distribute(layers())
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            copy_of(optimizer)
