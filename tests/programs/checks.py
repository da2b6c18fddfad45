"""Helpers for the programs that check behaviour on real ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping

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
