"""A hook's checks of its model's optimizers, during its whole life."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gtopk.compression import Compression
from gtopk.integrations.optimizer_checks import HookSkips, OptimizerChecks


def sgd_with_gradient(parameter: torch.nn.Parameter, **options: float) -> torch.optim.Optimizer:
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def checks_for(parameter: torch.nn.Parameter, stepped: torch.optim.Optimizer) -> OptimizerChecks:
    skips = HookSkips(lambda: {parameter}, 3)
    compression = Compression.gtopk(density=0.5)
    return OptimizerChecks(skips, compression, 0, logs_advice=False, hint="", stepped=stepped)


def test_hook_collected_during_a_step_does_not_break_it():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = sgd_with_gradient(parameter)
    hooks: list[OptimizerChecks] = []

    def collect(*call: object) -> None:
        if hooks:
            hooks.pop()

    handle = register_optimizer_step_pre_hook(collect)
    hooks += (checks_for(parameter, optimizer) for _ in range(3))
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        handle.remove()
    assert not hooks
    assert torch.equal(parameter, torch.full((3,), -0.3))


def test_only_living_hooks_check_optimizers():
    one, other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    first, second = (
        checks_for(one, sgd_with_gradient(one)),
        checks_for(other, sgd_with_gradient(other)),
    )
    for parameter in (one, other):
        with pytest.raises(ValueError, match="another SGD steps its model"):
            sgd_with_gradient(parameter).step()
    del first
    sgd_with_gradient(one).step()
    with pytest.raises(ValueError, match="another SGD steps its model"):
        sgd_with_gradient(other).step()
    del second
    sgd_with_gradient(other).step()


def test_container_may_call_step_of_the_hooks_optimizer():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = sgd_with_gradient(parameter)

    class Container(torch.optim.Optimizer):
        """One step for several optimizers, as in torchtitan."""

        def __init__(self) -> None:
            self.optimizers = [optimizer]
            super().__init__([parameter], {})

        def step(self, closure: None = None) -> None:
            for each in self.optimizers:
                each.step()

    hook = checks_for(parameter, optimizer)
    Container().step()
    assert torch.equal(parameter, torch.full((3,), -0.1))
    with pytest.raises(ValueError, match="another SGD steps its model"):
        sgd_with_gradient(parameter).step()
    del hook


def test_advice_to_optimizers_of_a_model_in_parts_is_to_use_one(caplog):
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    skips = HookSkips(lambda: {one, other}, 3)
    compression = Compression.gtopk(density=0.5)
    checks = OptimizerChecks(skips, compression, 0, logs_advice=True, hint="give it to the hook")
    for parameters in ([one], [one, other]):
        caplog.clear()
        checks.check(torch.optim.AdamW(parameters))
        text = " ".join(caplog.messages)
        assert "give it to the hook" in text
        assert ("let one optimizer, in groups, step all" in text) == (len(parameters) == 1)
