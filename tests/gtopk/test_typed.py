"""The type hints of the first calls in scripts: types, and literal options."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk.adaptive.balanced import BalancedLoader
from gtopk.adaptive.delayed_sync.delayed import DelayedLoader
from gtopk.adaptive.hogbatch.loader import HogbatchLoader
from gtopk.adaptive.model_averaging.loader import MergingLoader
from gtopk.compression import Compressing


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (hvd.DistributedOptimizer, ["synchronize", "skip_synchronize", "set_num_samples", "step"]),
        (gtopk.LocalSGD, ["outer_step", "step", "state_dict"]),
    ],
)
def test_wrappers_are_typed_as_optimizers_with_their_own_methods(call, names):
    hints = typing.get_type_hints(call)
    assert issubclass(hints["return"], torch.optim.Optimizer)
    for name in names:
        assert callable(getattr(hints["return"], name))
    assert hints["compression"] == Compressing
    assert Any not in (hints["return"], hints["optimizer"])


def test_options_are_typed_as_literals():
    hints = typing.get_type_hints(hvd.DistributedOptimizer)
    assert typing.get_args(hints["missing_gradients"]) == ("error", "zeros")
    assert typing.get_args(hints["adam_steps"]) == ("before", "after")


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="of Python 3.11")
def test_adapt_is_typed_with_the_loader_of_each_mode():
    loaders = {
        mode: hints["return"]
        for hints in map(typing.get_type_hints, typing.get_overloads(hvd.adapt))
        for mode in typing.get_args(hints["mode"])
    }
    assert loaders == {
        "balanced": BalancedLoader,
        "abs": DelayedLoader,
        "adaptive-sgd": MergingLoader,
        "hogbatch": HogbatchLoader,
        "adaptive-hogbatch": HogbatchLoader,
    }
