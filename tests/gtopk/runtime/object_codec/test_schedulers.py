"""The state of every torch learning rate scheduler is sent without a pickle."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from gtopk.runtime.object_codec import decode, encode

SCHEDULERS = {
    name: kind
    for module in (lr_scheduler, swa_utils)
    for name, kind in vars(module).items()
    if inspect.isclass(kind)
    and issubclass(kind, LRScheduler)
    and kind not in (LRScheduler, getattr(lr_scheduler, "_LRScheduler", None))
}


def arguments(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a scheduler's arguments besides its optimizer."""
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    needed: dict[str, dict[str, Any]] = {
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [2, 2, 5]},
        "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
        "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9},
        "ExponentialLR": {"gamma": 0.9},
        "SequentialLR": {"schedulers": parts, "milestones": [2]},
        "ChainedScheduler": {"schedulers": parts},
        "CosineAnnealingLR": {"T_max": 10},
        "CosineAnnealingWarmRestarts": {"T_0": 10},
        "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
        "SWALR": {"swa_lr": 0.05},
    }
    return needed.get(name, {})


def new_scheduler(name: str) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    return optimizer, SCHEDULERS[name](optimizer=optimizer, **arguments(name, optimizer))


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Return the learning rate after each step."""
    loss = [1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*loss)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_continues_from_the_received_state(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR itself makes the calls it warns about
        optimizer, scheduler = new_scheduler(name)
        rates(optimizer, scheduler, 3)
        state = scheduler.state_dict(), optimizer.state_dict()
        received = decode(encode(state, allow_pickle=False), allow_pickle=False)
        other, again = new_scheduler(name)
        again.load_state_dict(received[0])
        other.load_state_dict(received[1])
        assert rates(other, again, 4) == rates(optimizer, scheduler, 4)


def test_every_scheduler_of_torch_is_found() -> None:
    assert len(SCHEDULERS) >= 15
