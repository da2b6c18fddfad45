"""Helpers for the programs that check behaviour on real ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import gtopk.torch as hvd

BETAS = (0.9, 0.99)  # of Adam


def raises(kind: type[BaseException], call: Callable[[], object], *parts: str) -> str:
    """Check that a call raises, with all of these parts in its text; return the text."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def check_close(result: torch.Tensor | None, expected: torch.Tensor, what: object = "") -> None:
    """Check that tensors are equal: integers to the bit, floats to the rounding of their dtype.

    torch.testing has this, too, but takes seconds to import.
    """
    assert result is not None, what
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), what
    if not expected.dtype.is_floating_point:
        assert torch.equal(result, expected), f"{what}: {result} is not {expected}"
        return
    tolerance = 16 * torch.finfo(expected.dtype).eps * (1 + expected.double().abs())
    apart = (result.double() - expected.double()).abs()
    assert bool((apart <= tolerance).all()), f"{what}: {result} is not {expected}"


def logged(call: Callable[[], object]) -> list[str]:
    """Return the messages that gtopk logs during a call."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gtopk")
    log.addHandler(handler)
    call()
    log.removeHandler(handler)
    return messages


def same_everywhere(text: str) -> bool:
    """Tell whether this text is the same on every rank."""
    return len(set(hvd.allgather_object(text))) == 1


def same_bits_everywhere(tensor: torch.Tensor) -> bool:
    """Tell whether this tensor is the same on every rank, to the bit."""
    rows = hvd.allgather(tensor.detach().reshape(1, -1).contiguous().view(torch.uint8))
    return bool((rows == rows[0]).all())


def run_tests(program: Mapping[str, object]) -> None:
    """Call every function named test_... in the order of the file; warnings are errors.

    An exception ends the job on every rank.
    """
    warnings.simplefilter("error")
    # torch's advice on a machine with one core, which two workers share on purpose.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    for name, test in list(program.items()):
        if name.startswith("test_") and callable(test):
            test()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def adamw(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Return AdamW with two groups of different rates, betas and decays."""
    first, *others = model.parameters()
    groups = [
        {"params": [first], "lr": 0.02, "weight_decay": 0.2, "betas": (0.7, 0.9)},
        {"params": others},
    ]
    return kind(groups, **{"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, **options})


def equal(one: Any, other: Any) -> bool:
    """Tell whether two states are equal to the bit; of tensors in shards, this rank's shards."""
    if hasattr(one, "to_local"):
        return torch.equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(equal, one, other)) and len(one) == len(other)
    return bool(one == other)


def check_that_the_job_goes_on() -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def train_beside_adamw(
    model: torch.nn.Module,
    alone: torch.nn.Module,
    loss: Callable[[torch.nn.Module, int], torch.Tensor],
) -> None:
    """Take steps of SGD with a model whose hook has adam_correction=BETAS, and of AdamW alone."""
    rates = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = (
        (model, torch.optim.SGD(model.parameters(), **rates)),
        (alone, torch.optim.AdamW(alone.parameters(), betas=BETAS, **rates)),
    )
    for step in range(6):
        for trained, optimizer in optimizers:
            optimizer.zero_grad()
            loss(trained, step).backward()
            optimizer.step()
