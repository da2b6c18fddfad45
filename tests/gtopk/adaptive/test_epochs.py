"""The next batch starts at the right place, however iterations end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from gtopk.adaptive.loader_base import Epochs


def iterating(epochs: Epochs, steps: int = 8) -> Iterator[int]:
    with epochs.iterate() as (_, start):
        for step in range(start, steps):
            epochs.reach(step + 1)
            yield step


def new() -> Epochs:
    loader: Any = DataLoader(range(8))  # type: ignore[arg-type]
    return Epochs(loader)


def test_an_epoch_that_was_left_is_over_in_the_state_as_in_the_process() -> None:
    epochs, resumed = new(), new()
    for step in iterating(epochs):
        assert epochs.state_dict() == {"epoch": 0, "start": step + 1}
        if step == 2:
            break
    assert epochs.state_dict() == {"epoch": 1, "start": 0}
    assert epochs.state_dict(before_leaving=True) == {"epoch": 0, "start": 3}
    resumed.load_state_dict(epochs.state_dict())
    for each in (epochs, resumed):
        assert list(iterating(each)) == list(range(8))
        assert each.state_dict() == {"epoch": 2, "start": 0}


def test_an_epoch_that_is_left_by_an_error_is_over_too() -> None:
    epochs = new()

    def fails() -> None:
        for step in iterating(epochs):
            1 / (step - 1)

    with pytest.raises(ZeroDivisionError):
        fails()
    assert epochs.state_dict() == {"epoch": 1, "start": 0}


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_the_epoch_that_is_set_after_a_break_is_iterated_from_its_beginning(epoch: int) -> None:
    epochs, resumed = new(), new()
    for _ in iterating(epochs):
        break
    resumed.load_state_dict(epochs.state_dict())
    for each in (epochs, resumed):
        each.set(epoch)
        assert each.begin() == (epoch, 0)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_what_is_done_late_of_an_epoch_that_was_left_is_none_of_the_one_that_is_set(
    epoch: int,
) -> None:
    epochs = new()
    for _ in iterating(epochs):
        break
    epochs.set(epoch)
    epochs.reach(5)
    assert epochs.begin() == (epoch, 0)


def test_the_epoch_that_is_set_within_an_iteration_is_the_next() -> None:
    epochs = new()
    for step in iterating(epochs):
        if step == 2:
            epochs.set(4)
    assert epochs.begin() == (4, 0)


def test_the_epoch_that_a_resumed_run_sets_is_not_begun_anew() -> None:
    epochs = new()
    epochs.load_state_dict({"epoch": 3, "start": 5})
    epochs.set(3)
    assert epochs.begin() == (3, 5)


def test_an_iteration_that_is_closed_late_ends_no_other() -> None:
    epochs = new()
    first = iterating(epochs)
    next(first)
    second = iterating(epochs)
    next(second)
    with contextlib.closing(first):
        pass
    assert epochs.state_dict() == {"epoch": 1, "start": 1}
    epochs.load_state_dict({"epoch": 7, "start": 4})
    with contextlib.closing(second):
        pass
    assert epochs.state_dict() == {"epoch": 7, "start": 4}
