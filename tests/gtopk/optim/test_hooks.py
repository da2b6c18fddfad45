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


def test_backward_pass_beyond_the_limit_raises_until_forget():
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


def test_deleted_hooks_no_longer_count_backward_passes():
    parameter = torch.nn.Parameter(torch.ones(2))
    BackwardHooks({parameter: "it"}, 1).watch([parameter])
    gc.collect()
    for _ in range(3):
        parameter.sum().backward()


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_1_raises(limit):
    with pytest.raises(ValueError, match=f"at least 1, got {limit}"):
        BackwardHooks({}, limit)


class Listener:
    def __init__(self) -> None:
        self.reported: list[int] = []

    def hear(self, place: int) -> None:
        self.reported.append(place)


def test_gradient_is_complete_after_its_last_backward_pass():
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


def hooks_for_buckets(listener: Listener, *sizes: int, passes: int = 1) -> tuple[Any, list[Any]]:
    """Return hooks that report buckets of the given numbers of parameters, and all parameters."""
    buckets = [[torch.nn.Parameter(torch.ones(2)) for _ in range(size)] for size in sizes]
    parameters = [parameter for bucket in buckets for parameter in bucket]
    hooks = BackwardHooks({p: f"p{at}" for at, p in enumerate(parameters)}, passes, listener.hear)
    hooks.watch(parameters)
    hooks.watch_buckets(buckets)
    return hooks, parameters


@pytest.mark.parametrize("passes", [1, 2])
def test_bucket_is_reported_once_its_last_gradient_is_complete(passes):
    listener = Listener()
    hooks, parameters = hooks_for_buckets(listener, 3, 1, 2, passes=passes)
    for _ in range(2):
        for left in reversed(range(passes)):
            for at, parameter in enumerate(parameters):
                before = [*listener.reported]
                parameter.sum().backward()
                expected = {2: [0], 3: [1], 5: [2]}.get(at, []) if not left else []
                assert listener.reported == before + expected
        assert [id(p) for p in hooks.order] == [*map(id, parameters)]
        assert all(hooks.passes_left(parameter) == 0 for parameter in parameters)
        hooks.forget()
        listener.reported.clear()


def test_bucket_completed_in_another_order_is_reported_with_the_next():
    listener = Listener()
    _, (first, last, other) = hooks_for_buckets(listener, 2, 1)
    last.sum().backward()
    first.sum().backward()
    assert listener.reported in ([], [0])
    other.sum().backward()
    assert listener.reported == [0, 1]


def test_extra_backward_pass_within_a_bucket_raises_before_the_step():
    hooks, parameters = hooks_for_buckets(Listener(), 3)
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


def test_backward_passes_count_by_the_limit_they_were_run_under():
    hooks, parameters = hooks_for_buckets(Listener(), 3)
    hooks.set_limit(2)
    for _ in range(2):
        parameters[1].sum().backward()
    hooks.set_limit(1)
    hooks.check()
    assert hooks.order == [parameters[1]]


def test_backward_time_counts_buckets_with_a_missing_gradient():
    hooks, parameters = hooks_for_buckets(Listener(), 3)
    for parameter in parameters[:2]:
        parameter.sum().backward()
    hooks.forget()
    hooks.watch_buckets([parameters])  # the last one has no gradient
    parameters[0].sum().backward()
    time.sleep(0.01)
    parameters[1].sum().backward()
    assert hooks.order == parameters[:2]
    assert hooks.seconds >= 0.01


def test_deleted_hooks_leave_no_hook_on_parameters():
    hooks, parameters = hooks_for_buckets(Listener(), 3)
    hooks_ref = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert hooks_ref() is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)


@pytest.mark.parametrize("passes", [1, 4])
def test_backward_time_is_that_of_the_last_pass(monkeypatch, passes):
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
