"""A model and its optimizer's state lie in one memory, as if they had always been there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gtopk.adaptive.hogbatch.device_copy import DeviceCopy
from gtopk.adaptive.hogbatch.shared_model import Layout, SharedModel, layout_of, states_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(1)
    for parameter in made.double().parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return made


def share(
    made: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[SharedModel, list[Any], list[Any]]:
    parameters = list(made.parameters())
    states = states_of(optimizer, parameters)
    layout = layout_of(parameters, [str(n) for n in range(len(parameters))], states)
    shared = SharedModel(np.zeros(layout.size_bytes, np.uint8), layout)
    shared.fill(parameters, states)
    return shared, parameters, states


def train(
    made: torch.nn.Module, optimizer: torch.optim.Optimizer, copy: DeviceCopy | None = None
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        if copy is not None:
            copy.refresh()
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        made(x).square().mean().backward()
        optimizer.step()
        if copy is not None:
            copy.add(copy.steps())
    if copy is not None:
        copy.refresh()
    return torch.cat([parameter.detach().reshape(-1) for parameter in made.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_in_place_is_training_as_ever_to_the_bit(name: str) -> None:
    plain, made = model(), model()
    expected = train(plain, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](made.parameters())
    shared, parameters, states = share(made, optimizer)
    shared.map_into(parameters, states, optimizer)
    assert torch.equal(train(made, optimizer), expected)
    inside = [
        t for place, t in zip(shared.layout.places, shared.tensors, strict=True) if not place.key
    ]
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in inside]), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_a_copy_and_adding_its_steps_is_training_as_ever(name: str) -> None:
    plain, made = model(), model()
    expected = train(plain, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](made.parameters())
    shared, parameters, states = share(made, optimizer)
    copy = DeviceCopy(shared, parameters, states, optimizer)
    torch.testing.assert_close(train(made, optimizer, copy), expected, rtol=1e-11, atol=1e-13)


def test_a_copy_never_undoes_what_others_did_meanwhile() -> None:
    made = model()
    optimizer = OPTIMIZERS["momentum"](made.parameters())
    shared, parameters, states = share(made, optimizer)
    copy = DeviceCopy(shared, parameters, states, optimizer)
    copy.refresh()
    before = [tensor.clone() for tensor in shared.tensors]
    for tensor in shared.tensors:  # another worker's update
        tensor.add_(10)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    steps = copy.steps()
    copy.add(steps)
    for tensor, old, step in zip(shared.tensors, before, steps, strict=True):
        torch.testing.assert_close(tensor, old + 10 + step)
        assert step.abs().sum() > 0


def test_a_state_that_is_there_already_goes_on() -> None:
    plain, made = model(), model()
    optimizers = [OPTIMIZERS["adam"](each.parameters()) for each in (plain, made)]
    train(plain, optimizers[0])
    train(made, optimizers[1])
    shared, parameters, states = share(made, optimizers[1])
    shared.map_into(parameters, states, optimizers[1])
    assert torch.equal(train(made, optimizers[1]), train(plain, optimizers[0]))


def test_tensors_lie_in_lines_of_their_own() -> None:
    shared, *_ = share(made := model(), OPTIMIZERS["adam"](made.parameters()))
    layout: Layout = shared.layout
    ends = [place.first_byte + place.size_bytes for place in layout.places]
    assert all(place.first_byte % 64 == 0 for place in layout.places)
    assert all(end <= nxt.first_byte for end, nxt in zip(ends, layout.places[1:], strict=False))
    assert ends[-1] <= layout.size_bytes
    assert any("state 'exp_avg' of parameter 0, [5, 3]" in fact for fact in layout.facts)


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
        (torch.empty(3, device="meta"), "it is on the device 'meta'"),
        (torch.nn.UninitializedParameter(), "it is a UninitializedParameter"),
    ],
)
def test_a_parameter_that_cannot_be_shared_is_an_error(
    parameter: torch.Tensor, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"parameter 'weight' cannot be shared.*: {reason}"):
        layout_of([parameter], ["weight"], [{}])
