"""A model and its optimizer's state move to shared memory without visible changes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from gtopk.adaptive.hogbatch.shared_model import (
    DeviceCopy,
    Layout,
    SharedModel,
    layout_of,
    require_shareable,
    states_of,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}


class WithScale(torch.optim.SGD):
    """An optimizer with an attribute outside its groups and defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.scale = 2.0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] *= self.scale
        super().step(closure)


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(1)
    for parameter in made.double().parameters():
        parameter.data.normal_(generator=generator)
    return made


def share(
    made: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[SharedModel, list[Any], list[Any]]:
    parameters = list(made.parameters())
    states = states_of(optimizer, parameters)
    layout = layout_of(parameters, states)
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
        with copy.on_shared_memory() if copy is not None else nullcontext():
            optimizer.step()
    if copy is not None:
        copy.refresh()
    return torch.cat([parameter.detach().reshape(-1) for parameter in made.parameters()])


@pytest.mark.parametrize("by_copy", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_shared_memory_equals_plain_training_bitwise(name: str, by_copy: bool) -> None:
    plain, made = model(), model()
    expected = train(plain, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](made.parameters())
    shared, parameters, states = share(made, optimizer)
    shared.map_state(parameters, states, optimizer)
    if not by_copy:
        shared.map_parameters(parameters)
    copy = DeviceCopy(shared, parameters) if by_copy else None
    assert torch.equal(train(made, optimizer, copy), expected)
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in shared.parameters]), expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fused_step_on_shared_memory_accepts_gradients_in_any_strides(kind: Any) -> None:
    """Regression: the step paired entries in memory order, also for tensors in channels_last."""
    stepped = []
    for layout in (torch.contiguous_format, torch.channels_last):
        made = torch.nn.Conv2d(3, 4, 3, bias=False)
        with torch.no_grad():
            made.weight.copy_(torch.arange(108.0).view(4, 3, 3, 3))
        made = made.to(memory_format=layout)
        optimizer = kind(made.parameters(), lr=0.1, fused=True)
        shared, parameters, states = share(made, optimizer)
        shared.map_state(parameters, states, optimizer)
        copy = DeviceCopy(shared, parameters)
        made.weight.grad = torch.arange(108.0).view_as(made.weight).sin().to(memory_format=layout)
        with copy.on_shared_memory():
            optimizer.step()
        stepped.append(shared.parameters[0])
    assert torch.equal(*stepped)


def test_gradient_from_before_sharing_is_not_reused_with_its_old_strides() -> None:
    """Regression: a fused step paired the gradient with memory of other strides."""
    made = torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, fused=True)
    x = torch.randn(1, 3, 5, 5)
    made(x).sum().backward()
    shared, parameters, _ = share(made, optimizer)
    shared.map_parameters(parameters)
    optimizer.zero_grad(set_to_none=False)
    before = made.weight.detach().clone()
    made(x).sum().backward()
    (gradient,) = torch.autograd.grad(made(x).sum(), [made.weight])
    optimizer.step()
    torch.testing.assert_close(made.weight.detach(), before - 0.1 * gradient)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stale_update_equals_plain_optimizer_step(name: str) -> None:
    """Regression: the copy's state change was added 600 updates later, so that v < 0 gave NaN."""
    plain, slow, fast = model(), model(), model()
    oracle, *optimizers = (OPTIMIZERS[name](each.parameters()) for each in (plain, slow, fast))
    shared, in_place, states = share(slow, optimizers[0])
    shared.map_state(in_place, states, optimizers[0])
    shared.map_parameters(in_place)
    beside = list(fast.parameters())
    shared.map_state(beside, [dict(state) for state in states], optimizers[1])
    copy = DeviceCopy(shared, beside)

    def step(optimizer: torch.optim.Optimizer, size: float) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()

    for size in (1.0, *[1e-3] * 600, 0.01):
        if size == 1.0:
            copy.refresh()
        step(oracle, size)
        with copy.on_shared_memory() if size == 0.01 else nullcontext():
            step(optimizers[size == 0.01], size)
    assert all(map(torch.equal, shared.parameters, plain.parameters()))
    for parameter, other in zip(plain.parameters(), beside, strict=True):
        expected, found = oracle.state[parameter], optimizers[1].state[other]
        assert all(
            torch.equal(found[key], expected[key]) for key in expected if expected[key] is not None
        )


def test_device_copy_is_restored_after_step_on_shared_memory() -> None:
    made = model()
    optimizer = OPTIMIZERS["momentum"](made.parameters())
    shared, parameters, states = share(made, optimizer)
    shared.map_state(parameters, states, optimizer)
    copy = DeviceCopy(shared, parameters)
    own = [parameter.data_ptr() for parameter in parameters]
    made(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    with copy.on_shared_memory():
        assert not set(own) & {parameter.data_ptr() for parameter in parameters}
    assert [parameter.data_ptr() for parameter in parameters] == own
    assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))


def test_existing_optimizer_state_is_kept() -> None:
    plain, made = model(), model()
    optimizers = [OPTIMIZERS["adam"](each.parameters()) for each in (plain, made)]
    train(plain, optimizers[0])
    train(made, optimizers[1])
    shared, parameters, states = share(made, optimizers[1])
    shared.map_state(parameters, states, optimizers[1])
    shared.map_parameters(parameters)
    assert torch.equal(train(made, optimizers[1]), train(plain, optimizers[0]))


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_parameter_without_state_gets_shared_state(name: str) -> None:
    """Regression: if others had a state, as after thawing a layer, each worker created its own."""
    plain, made = model(), model()
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (plain, made)]
    for each, optimizer in zip((plain, made), optimizers, strict=True):
        each[0].requires_grad_(False)
        train(each, optimizer)
        each[0].requires_grad_()
    shared, parameters, states = share(made, optimizers[1])
    shared.map_state(parameters, states, optimizers[1])
    shared.map_parameters(parameters)
    kept = [optimizers[1].state[parameter] for parameter in parameters]
    assert {*kept[0]} == {*kept[-1]}
    places = {place.parameter for place in shared.layout.places if place.key}
    assert places == set(range(len(parameters)))
    assert torch.equal(train(made, optimizers[1]), train(plain, optimizers[0]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.SparseAdam, "SparseAdam cannot step .* does not support dense gradients"),
        (lambda p: torch.optim.Adam(p, capturable=True), "Adam cannot step .* capturable=True"),
        (WithScale, r"WithScale cannot step .* but not self\.scale, which belongs in one of them"),
    ],
)
def test_optimizer_that_cannot_step_on_shared_memory_raises(make: Any, reason: str) -> None:
    parameters = list(model().parameters())
    with pytest.raises(ValueError, match=reason):
        states_of(make(parameters), parameters)


def test_shared_tensors_begin_on_separate_cache_lines() -> None:
    shared, *_ = share(made := model(), OPTIMIZERS["adam"](made.parameters()))
    layout: Layout = shared.layout
    ends = [place.first_byte + place.size_bytes for place in layout.places]
    assert all(place.first_byte % 64 == 0 for place in layout.places)
    assert all(end <= nxt.first_byte for end, nxt in zip(ends, layout.places[1:], strict=False))
    assert ends[-1] <= layout.size_bytes
    assert any("state 'exp_avg' of parameter 0, [5, 3]" in fact for fact in layout.signature)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
        (torch.empty(3, device="meta"), "it is on the device 'meta'"),
        (torch.zeros(3, 1).expand(3, 3), "its elements share memory"),
    ],
)
def test_unshareable_parameter_raises(tensor: torch.Tensor, reason: str) -> None:
    names = {torch.nn.Parameter(torch.zeros(2)): "bias", torch.nn.Parameter(tensor): "weight"}
    with pytest.raises(ValueError, match=f"parameter 'weight' cannot be shared.*: {reason}"):
        require_shareable(names)


def test_overlapping_parameters_raise() -> None:
    """Regression: each view got its own memory, so that one parameter became two."""
    memory = torch.zeros(4, 6)
    a, b = torch.nn.Parameter(memory), torch.nn.Parameter(memory.view(-1)[20:])
    for trained, other in ((a, b), (b, a)):
        other.requires_grad_(False)
        with pytest.raises(ValueError, match="parameters 'a' and 'b' share memory"):
            require_shareable({b: "b", a: "a"})
        trained.requires_grad_(False)
        require_shareable({a: "a", b: "b"})
        trained.requires_grad_()
        other.requires_grad_()


def test_adjacent_parameters_of_one_buffer_are_shareable() -> None:
    """The weights of an LSTM on a GPU lie like this."""
    first, second = torch.zeros(24).split([10, 14])
    require_shareable(
        {
            torch.nn.Parameter(first.view(2, 5)): "a",
            torch.nn.Parameter(second.view(2, 7).t()): "b",
            torch.nn.Parameter(torch.zeros(0)): "empty",
        }
    )
