"""A wrapped optimizer is of the user's class, and shares its groups and state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from collectives.transports import local_world
from gtopk import world
from gtopk.wrapping import Wrapping, wrap
from tests.gtopk.four_layers import distribute, layers


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.5)


def test_groups_and_state_are_the_wrapped_optimizer_s_own():
    inner = sgd()
    optimizer = wrap(inner, Wrapping)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    (parameter,) = inner.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert inner.param_groups is optimizer.param_groups
    assert inner.state[parameter]["momentum_buffer"].tolist() == [1.0, 1.0]


def test_loading_a_state_keeps_the_groups_that_schedulers_hold():
    inner = sgd()
    optimizer = wrap(inner, Wrapping)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert inner.param_groups is optimizer.param_groups
    assert inner.param_groups[0]["lr"] == 0.25


def test_what_is_wrapped_is_not_wrapped_again():
    with pytest.raises(ValueError, match="distributed already"):
        wrap(wrap(sgd(), Wrapping), Wrapping)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_distributed_optimizer_is_not_copied(copy_of):
    with world.entered(local_world(1)[0]):
        optimizer = distribute(layers())
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            copy_of(optimizer)
