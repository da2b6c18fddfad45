"""Backward passes are counted by parameter, and one too many is an error."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from gtopk.optim import hooks as module
from gtopk.optim.hooks import BackwardHooks


def test_one_pass_more_than_the_limit_is_an_error_until_forgotten():
    parameter, other = (torch.nn.Parameter(torch.ones(2)) for _ in "ab")
    passes = BackwardHooks({parameter: "it", other: "the other"}, 2)
    passes.watch([parameter, other])
    for _ in range(2):
        parameter.sum().backward()
    other.sum().backward()
    with pytest.raises(AssertionError, match="'it' was computed 3 times"):
        parameter.sum().backward()
    passes.forget()
    parameter.sum().backward()


def test_parameters_outlive_what_counts_them():
    parameter = torch.nn.Parameter(torch.ones(2))
    BackwardHooks({parameter: "it"}, 1).watch([parameter])
    gc.collect()
    for _ in range(3):
        parameter.sum().backward()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_step_takes_one_pass_at_least(limit):
    with pytest.raises(ValueError, match=f"at least 1, got {limit}"):
        BackwardHooks({}, limit)


class Listener:
    def __init__(self) -> None:
        self.heard: list[torch.nn.Parameter] = []

    def hear(self, parameter: torch.nn.Parameter) -> None:
        self.heard.append(parameter)


def test_a_gradient_is_complete_when_its_last_pass_is_done():
    first, last, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in "abc")
    frozen.requires_grad_(False)
    listener = Listener()
    hooks = BackwardHooks(dict.fromkeys([first, last, frozen], ""), 2, listener.hear)
    for _ in range(2):
        hooks.watch([first, last, frozen])  # once is enough
    ((first.tanh() * last).sum() + frozen.sum()).backward()
    assert listener.heard == []
    assert hooks.passes_left(first) == 1
    (first.tanh() * last).sum().backward()
    assert {id(p) for p in listener.heard} == {id(first), id(last)}
    assert hooks.order == listener.heard
    assert hooks.seconds > 0
    hooks.forget()
    assert hooks.order == []
    assert hooks.passes_left(first) == 2


@pytest.mark.parametrize("passes", [1, 4])
def test_the_last_pass_of_a_step_is_the_one_that_is_timed(monkeypatch, passes):
    """Gradients are exchanged in it; before it come forwards and data, too."""
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    layers = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    rare = torch.nn.Parameter(torch.ones(2))  # has no gradient in other passes
    hooks = BackwardHooks(dict.fromkeys([rare, *layers], ""), passes)
    hooks.watch([rare, *layers])
    for _ in range(2):
        for left in reversed(range(passes)):
            began = next(ticks) + 1
            used = layers if left else [rare, *layers]  # backward begins with the last one
            sum(p.tanh().sum() for p in used).backward()
        assert (hooks.began, hooks.seconds) == (began, len(layers))
        hooks.forget()
