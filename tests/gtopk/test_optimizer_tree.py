"""Where a rank makes the tensors of the root's state that it lacks."""

from __future__ import annotations

import pytest
import torch

from gtopk.optimizer_tree import make_tensors, put_tensors_in, take_tensors_out, tree


def stepped(device: str) -> torch.optim.Optimizer:
    """Return Adam as after a step; "meta" stands for a GPU, which need not be here."""
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
def test_tensors_are_made_beside_their_parameter_as_on_the_root(root: str, here: str) -> None:
    source = stepped(root)
    skeleton, slots = take_tensors_out(tree(source), source)
    target = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, device=here))], foreach=False)
    state = put_tensors_in(skeleton, make_tensors(slots, tree(target), target))["parameters"][0]
    assert state["exp_avg"].device.type == here
    assert state["history"][0].device.type == here
    assert state["history"][1] == (None, 1)
    assert state["step"].device.type == "cpu"
    assert state["step"].item() == 3.0
    assert state["offloaded"].device.type == (here if root == "cpu" else "cpu")


def test_taking_tensors_out_leaves_the_optimizer_as_it_was() -> None:
    optimizer = stepped("cpu")
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
