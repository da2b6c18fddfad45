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


def new_epochs() -> Epochs:
    loader: Any = DataLoader(range(8))  # type: ignore[arg-type]
    return Epochs(loader)


def test_epoch_left_by_break_is_over_in_state_and_process() -> None:
    epochs, resumed = new_epochs(), new_epochs()
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


def test_epoch_left_by_an_error_is_over() -> None:
    epochs = new_epochs()

    def fails() -> None:
        for step in iterating(epochs):
            1 / (step - 1)

    with pytest.raises(ZeroDivisionError):
        fails()
    assert epochs.state_dict() == {"epoch": 1, "start": 0}


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_epoch_set_after_break_begins_at_its_start(epoch: int) -> None:
    epochs, resumed = new_epochs(), new_epochs()
    for _ in iterating(epochs):
        break
    resumed.load_state_dict(epochs.state_dict())
    for each in (epochs, resumed):
        each.set(epoch)
        assert each.begin() == (epoch, 0)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_late_progress_of_a_left_epoch_does_not_count_for_the_set_epoch(
    epoch: int,
) -> None:
    epochs = new_epochs()
    for _ in iterating(epochs):
        break
    epochs.set(epoch)
    epochs.reach(5)
    assert epochs.begin() == (epoch, 0)


def test_epoch_set_within_iteration_is_the_next() -> None:
    epochs = new_epochs()
    for step in iterating(epochs):
        if step == 2:
            epochs.set(4)
    assert epochs.begin() == (4, 0)


def test_setting_the_resumed_epoch_keeps_its_position() -> None:
    epochs = new_epochs()
    epochs.load_state_dict({"epoch": 3, "start": 5})
    epochs.set(3)
    assert epochs.begin() == (3, 5)


def test_closing_an_old_iteration_does_not_end_a_later_one() -> None:
    epochs = new_epochs()
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
