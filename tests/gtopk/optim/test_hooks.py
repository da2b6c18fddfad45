"""Backward passes are counted per parameter, and one too many raises."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from types import SimpleNamespace
from typing import Any

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
    with pytest.raises(AssertionError, match=r"computed 3 times.* delete an optimizer"):
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
        self.heard: list[int] = []

    def hear(self, place: int) -> None:
        self.heard.append(place)


def test_a_gradient_is_complete_when_its_last_pass_is_done():
    first, last, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in "abc")
    frozen.requires_grad_(False)
    hooks = BackwardHooks(dict.fromkeys([first, last, frozen], ""), 2)
    for _ in range(2):
        hooks.watch([first, last, frozen])  # once is enough
    ((first.tanh() * last).sum() + frozen.sum()).backward()
    assert hooks.order == []
    assert hooks.passes_left(first) == 1
    (first.tanh() * last).sum().backward()
    assert {id(p) for p in hooks.order} == {id(first), id(last)}
    assert hooks.seconds > 0
    hooks.forget()
    assert hooks.order == []
    assert hooks.passes_left(first) == 2


def awaited(listener: Listener, *sizes: int, passes: int = 1) -> tuple[Any, list[Any]]:
    """Return hooks that report buckets of the given numbers of parameters, and the parameters."""
    buckets = [[torch.nn.Parameter(torch.ones(2)) for _ in range(size)] for size in sizes]
    parameters = [parameter for bucket in buckets for parameter in bucket]
    hooks = BackwardHooks({p: f"p{at}" for at, p in enumerate(parameters)}, passes, listener.hear)
    hooks.watch(parameters)
    hooks.watch_buckets(buckets)
    return hooks, parameters


@pytest.mark.parametrize("passes", [1, 2])
def test_a_bucket_is_told_of_once_its_last_gradient_is_complete(passes):
    listener = Listener()
    hooks, parameters = awaited(listener, 3, 1, 2, passes=passes)
    for _ in range(2):
        for left in reversed(range(passes)):
            for at, parameter in enumerate(parameters):
                before = [*listener.heard]
                parameter.sum().backward()
                news = {2: [0], 3: [1], 5: [2]}.get(at, []) if not left else []
                assert listener.heard == before + news
        assert [id(p) for p in hooks.order] == [*map(id, parameters)]
        assert all(hooks.passes_left(parameter) == 0 for parameter in parameters)
        hooks.forget()
        listener.heard.clear()


def test_a_bucket_that_is_complete_in_another_order_is_told_of_with_the_next():
    listener = Listener()
    _, (first, last, other) = awaited(listener, 2, 1)
    last.sum().backward()
    first.sum().backward()
    assert listener.heard in ([], [0])
    other.sum().backward()
    assert listener.heard == [0, 1]


def test_a_pass_too_many_of_gradients_within_a_bucket_is_found_before_the_step():
    hooks, parameters = awaited(Listener(), 3)
    for _ in range(2):
        parameters[1].sum().backward()
    assert not hooks.order  # reading, for example to drop gradients, does not raise
    with pytest.raises(AssertionError, match="'p1' was computed 2 times"):
        hooks.check()
    hooks.check()  # after catching the error, a step is allowed
    hooks.forget()
    for _ in range(2):
        parameters[1].sum().backward()
    with pytest.raises(AssertionError, match="'p1' was computed 2 times"):
        parameters[2].sum().backward()


def test_passes_count_by_the_limit_that_they_were_made_under():
    hooks, parameters = awaited(Listener(), 3)
    hooks.set_limit(2)
    for _ in range(2):
        parameters[1].sum().backward()
    hooks.set_limit(1)
    hooks.check()
    assert hooks.order == [parameters[1]]


def test_a_parameter_without_a_gradient_does_not_hide_how_long_backward_takes():
    hooks, parameters = awaited(Listener(), 3)
    for parameter in parameters[:2]:
        parameter.sum().backward()
    hooks.forget()
    hooks.watch_buckets([parameters])  # the last of which had none
    parameters[0].sum().backward()
    time.sleep(0.01)
    parameters[1].sum().backward()
    assert hooks.order == parameters[:2]
    assert hooks.seconds >= 0.01


def test_who_is_gone_leaves_no_list_that_grows():
    hooks, parameters = awaited(Listener(), 3)
    heard = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert heard() is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)


@pytest.mark.parametrize("passes", [1, 4])
def test_the_last_pass_of_a_step_is_the_one_that_is_timed(monkeypatch, passes):
    """Gradients are exchanged in it; the time before it includes forward passes and data."""
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
