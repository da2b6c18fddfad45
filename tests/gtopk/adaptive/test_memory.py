"""A batch that does not fit gives the same gradients in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from gtopk.adaptive.memory import Memory, slice_of


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
def test_parts_give_the_gradients_of_the_whole(
    summed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1).double()
    whole_loss = loss_that_fits(model, 99, summed, [])(batch(11))
    whole_loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    calls = [0]
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(calls.pop() + 1))
    memory, tried = Memory(3, list(model.parameters())), []
    loss_of = loss_that_fits(model, 3, summed, tried)
    with caplog.at_level(logging.WARNING, "gtopk"):
        loss = memory.backward(loss_of, batch(11), 11, summed)
    assert tried == [11, 6, 3, 3, 3, 2]
    assert memory.most == 3
    assert loss.item() == pytest.approx(whole_loss.item())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert calls == [1]  # a hook sees one gradient, as of one backward pass
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


def test_what_does_not_fit_even_alone_is_raised() -> None:
    model = torch.nn.Linear(2, 1).double()
    memory = Memory(0, list(model.parameters()))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        memory.backward(loss_that_fits(model, 0, False, []), batch(4), 4, False)


def test_other_errors_are_not_taken_for_it() -> None:
    memory = Memory(0, list(torch.nn.Linear(1, 1).parameters()))

    def loss_of(part: Any) -> torch.Tensor:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        memory.backward(loss_of, torch.zeros(4), 4, False)
    assert memory.most is None


def test_a_batch_of_something_else_cannot_be_divided() -> None:
    with pytest.raises(TypeError, match="holds a object cannot be divided"):
        slice_of([torch.zeros(4), object()], 4, 0, 2)
