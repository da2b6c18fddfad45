"""The tasks, including a full ResNet-18 with batch norm in training and evaluation mode."""

from __future__ import annotations

import torch

from gtopk.cli.simulate.setting import open_task


def test_resnet18_task_is_full_size_and_evaluation_keeps_its_state() -> None:
    task = open_task("digits-resnet18", 0)
    assert task.length == 11_173_962
    few = task._replace(test_x=task.test_x[:8], test_y=task.test_y[:8])
    model, again = task.model(), task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert 0 <= few.accuracy(model) <= 1
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert torch.equal(tensor, again.state_dict()[name]), "every model begins alike"
    task.loss(model, torch.arange(4)).backward()
    moved = [name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])]
    assert moved
    assert all("running" in name or "batches_tracked" in name for name in moved)
