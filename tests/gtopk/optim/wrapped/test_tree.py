"""The device on which a rank creates tensors that it lacks from the root's state."""

from __future__ import annotations

import pytest
import torch

from gtopk.optim.wrapped.tree import (
    lay_out_as_parameters,
    make_tensors,
    put_tensors_in,
    take_tensors_out,
    tree,
)


def adam_after_a_step(device: str) -> torch.optim.Optimizer:
    """Return Adam as after a step; "meta" replaces a GPU."""
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.Adam([parameter], foreach=False)
    optimizer.state[parameter] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.zeros(2, device=device),
        "offloaded": torch.zeros(2),
        "history": [torch.zeros(2, device=device), (None, 1)],
    }
    return optimizer


@pytest.mark.parametrize("here", ["cpu", "meta"])
@pytest.mark.parametrize("root", ["cpu", "meta"])
def test_tensors_are_created_beside_their_parameter_as_on_the_root(root: str, here: str) -> None:
    source = adam_after_a_step(root)
    skeleton, slots = take_tensors_out(tree(source), source)
    target = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, device=here))], foreach=False)
    state = put_tensors_in(skeleton, make_tensors(slots, tree(target), target))["parameters"][0]
    assert state["exp_avg"].device.type == here
    assert state["history"][0].device.type == here
    assert state["history"][1] == (None, 1)
    assert state["step"].device.type == "cpu"
    assert state["step"].item() == 3.0
    assert state["offloaded"].device.type == (here if root == "cpu" else "cpu")


def test_take_tensors_out_leaves_the_optimizer_unchanged() -> None:
    optimizer = adam_after_a_step("cpu")
    before = {key: id(part) for key, part in next(iter(optimizer.state.values())).items()}
    skeleton, slots = take_tensors_out(tree(optimizer), optimizer)
    assert {key: id(part) for key, part in next(iter(optimizer.state.values())).items()} == before
    assert skeleton["parameters"][0]["exp_avg"] is None
    assert [slot.path[2:] for slot in slots] == [
        ("step",),
        ("exp_avg",),
        ("offloaded",),
        ("history", 0),
    ]


def test_state_gets_its_parameters_strides_and_keeps_dtype_and_device() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2).t())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    laid_out = torch.arange(6.0).reshape(3, 2).t()
    state = {
        "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "elsewhere": torch.zeros(2, 3, device="meta"),
        "laid out": laid_out,
        "another shape": torch.zeros(3, 2),
        "step": torch.tensor(1.0),
        "number": 1,
    }
    optimizer.state[parameter] = dict(state)
    optimizer.state["other"] = other = torch.zeros(2, 3)
    lay_out_as_parameters(optimizer)
    result = optimizer.state[parameter]
    assert result["wide"].stride() == result["elsewhere"].stride() == parameter.stride()
    assert torch.equal(result["wide"], state["wide"])
    assert result["wide"].dtype is torch.float64
    assert result["elsewhere"].device.type == "meta"
    assert all(result[key] is state[key] for key in list(state)[2:])
    assert optimizer.state["other"] is other
