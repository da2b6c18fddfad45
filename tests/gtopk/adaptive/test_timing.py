"""A timer runs from when a batch is handed out to its last gradient."""

from __future__ import annotations

import gc

import torch

from gtopk.adaptive.throughput import GradientTimer


def timer_of(layer: torch.nn.Module) -> GradientTimer:
    return GradientTimer(torch.optim.SGD(layer.parameters(), lr=0.1))


def test_batch_without_gradients_has_no_time() -> None:
    layer = torch.nn.Linear(2, 1)
    timer = timer_of(layer)
    assert timer.elapsed_seconds() is None
    timer.start(4)
    assert timer.elapsed_seconds() is None


def test_batch_time_is_returned_once() -> None:
    layer = torch.nn.Linear(2, 1)
    timer = timer_of(layer)
    timer.start(4)
    layer(torch.ones(1, 2)).sum().backward()
    assert timer.elapsed_seconds() is not None
    assert timer.elapsed_seconds() is None


def test_thawed_layer_is_timed_from_the_next_batch() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    first.requires_grad_(False)
    timer = timer_of(torch.nn.Sequential(first, second))
    timer.start(4)
    first.requires_grad_(True)
    second.requires_grad_(False)
    for seconds_are_known in (False, True):
        second(first(torch.ones(1, 2))).sum().backward()
        assert (timer.elapsed_seconds() is not None) == seconds_are_known
        timer.start(4)


def test_layer_frozen_between_its_steps_is_timed() -> None:
    layer = torch.nn.Linear(2, 1)
    timer = timer_of(layer)
    layer.requires_grad_(False)
    timer.start(1)
    layer.requires_grad_(True)
    layer(torch.ones(1, 2)).sum().backward()
    assert timer.elapsed_seconds() is not None


def test_parameter_trains_after_its_timer_is_freed() -> None:
    layer = torch.nn.Linear(2, 1)
    timer = timer_of(layer)
    timer.start(1)
    del timer
    gc.collect()
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
