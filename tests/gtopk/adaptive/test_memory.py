"""A batch that does not fit in memory gives the same gradients in parts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from gtopk.adaptive.current_batch import Memory, slice_of


class Batch(NamedTuple):
    x: torch.Tensor
    rest: dict[str, Any]


def batch(size: int) -> Batch:
    x = torch.arange(2.0 * size, dtype=torch.float64).reshape(size, 2)
    return Batch(x, {"names": [str(i) for i in range(size)], "scale": torch.tensor(3.0)})


def loss_that_fits(
    model: torch.nn.Module, most: int, summed: bool, tried: list[int]
) -> Callable[[Batch], torch.Tensor]:
    def loss_of(part: Batch) -> torch.Tensor:
        tried.append(len(part.x))
        assert len(part.rest["names"]) == len(part.x)
        if len(part.x) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        each = (model(part.x) * part.rest["scale"]) ** 2
        return each.sum() if summed else each.mean()

    return loss_of


@pytest.mark.parametrize("summed", [False, True])
def test_batch_in_parts_gives_gradients_of_the_whole_batch(
    summed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1).double()
    whole_loss = loss_that_fits(model, 99, summed, [])(batch(11))
    whole_loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    calls = [0]
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(calls.pop() + 1))
    memory, tried = Memory(3), []
    loss_of = loss_that_fits(model, 3, summed, tried)
    with caplog.at_level(logging.WARNING, "gtopk"):
        loss = memory.backward(loss_of, batch(11), 11, summed)
    assert tried == [11, 6, 3, 3, 3, 2]
    assert memory.max_samples == 3
    assert loss.item() == pytest.approx(whole_loss.item())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert calls == [1]  # a hook sees a single gradient, as after a single backward pass
    assert [r.getMessage() for r in caplog.records] == [
        f"rank 3: a batch of {size} samples does not fit into memory; from now on at most {most} "
        "are computed at once"
        for size, most in ((11, 6), (6, 3))
    ]
    tried.clear()
    caplog.clear()
    memory.backward(loss_of, batch(7), 7, summed)
    assert tried == [3, 3, 1]
    assert not caplog.records


def in_parts(loss_of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Compute a mean's gradients two samples at a time."""
    memory = Memory(0)
    memory.max_samples = 2
    memory.backward(loss_of, x, len(x), summed=False)


@pytest.mark.parametrize("b_is_summed", [False, True])
def test_gradients_sharing_memory_are_accumulated_once(b_is_summed: bool) -> None:
    """The gradient of a + b is one tensor for both; that of a sum is one value for all elements."""
    a, b = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return (part * (a + (b.sum() if b_is_summed else b))).sum(1).mean()

    loss_of(x).backward()
    expected = [a.grad, b.grad]
    a.grad = b.grad = None
    in_parts(loss_of, x)
    torch.testing.assert_close([a.grad, b.grad], expected)


def test_backward_in_parts_trains_all_parameters_that_require_gradients() -> None:
    """Layers thawed or frozen since; parameters of other optimizers, or of none."""
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    x = torch.ones(6, 2)
    for frozen in layers:
        model.requires_grad_(True)
        frozen.requires_grad_(False)
        model.zero_grad()
        in_parts(lambda part: model(part).mean(), x)
        for layer in layers:
            assert (layer.weight.grad is None) == (layer is frozen)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="all parameters may be frozen, or the loss detached"):
        in_parts(lambda part: model(part).mean(), x)


def test_part_with_constant_loss_adds_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    in_parts(lambda part: (part * weight).sum() if part.any() else part.sum(), torch.eye(6)[:, :2])
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([1 / 3, 1 / 3])


def test_gradient_hook_runs_once_on_the_whole_gradient() -> None:
    weight, given = torch.nn.Parameter(torch.ones(2)), []
    weight.register_hook(lambda gradient: given.append(gradient) or 3 * gradient)
    in_parts(lambda part: (part * weight).sum(1).mean(), torch.ones(6, 2))
    assert len(given) == 1
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([3.0, 3.0])


def test_leaves_created_in_a_part_are_freed_with_it() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        hidden = (part * weight).detach().requires_grad_()
        made.append(weakref.ref(hidden))
        alive.append(sum(leaf() is not None for leaf in made))
        return (hidden.sum(1) + (part * weight).sum(1)).mean()

    in_parts(loss_of, torch.ones(20, 2))
    assert len(alive) == 10
    assert max(alive) <= 2
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([1.0, 1.0])


def test_single_sample_out_of_memory_raises() -> None:
    model = torch.nn.Linear(2, 1).double()
    memory = Memory(0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        memory.backward(loss_that_fits(model, 0, False, []), batch(4), 4, False)


def test_other_errors_are_not_treated_as_out_of_memory() -> None:
    memory = Memory(0)

    def loss_of(part: Any) -> torch.Tensor:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        memory.backward(loss_of, torch.zeros(4), 4, False)
    assert memory.max_samples is None


def test_batch_of_unknown_type_cannot_be_divided() -> None:
    with pytest.raises(TypeError, match="holds a object cannot be divided"):
        slice_of([torch.zeros(4), object()], 4, 0, 2)
