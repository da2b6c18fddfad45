"""The state of every torch optimizer is sent without a pickle, and works on the receiver."""

from __future__ import annotations

import inspect

import pytest
import torch

from gtopk.runtime.object_codec import decode, encode

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIONS = {"SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}}


def trained(name: str, parameter: torch.nn.Parameter, steps: int) -> torch.optim.Optimizer:
    options = {"lr": 0.1, **OPTIONS.get(name, {})}
    optimizer = OPTIMIZERS[name]([parameter], **options)
    step(optimizer, parameter, steps)
    return optimizer


def step(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, steps: int) -> None:
    def closure() -> torch.Tensor:
        loss = (parameter**4).sum()
        parameter.grad = torch.autograd.grad(loss, parameter)[0]
        if isinstance(optimizer, torch.optim.SparseAdam):
            parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_continues_from_the_received_state(name: str) -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    optimizer = trained(name, parameter, steps=2)
    received = decode(encode(optimizer.state_dict(), allow_pickle=False), allow_pickle=False)
    assert received["state"]

    copy = torch.nn.Parameter(parameter.detach().clone())
    other = trained(name, copy, steps=0)
    other.load_state_dict(received)
    step(optimizer, parameter, steps=2)
    step(other, copy, steps=2)
    assert torch.equal(copy, parameter)


def test_every_optimizer_of_torch_is_found() -> None:
    assert len(OPTIMIZERS) >= 13
