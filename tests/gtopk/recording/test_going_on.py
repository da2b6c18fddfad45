"""The record of a run that goes on: in a new world, from a checkpoint, from a script's own word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk.recording.endpoint import Address
from gtopk.recording.reading import Run, read_run
from gtopk.world import world


class Training:
    """A model of two weights and its optimizer, which take steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.distribute()

    def distribute(self) -> None:
        """Wrap an optimizer, as a new world needs one."""
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters())

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()


@pytest.fixture
def training() -> Iterator[Training]:
    """Begin a world of one rank, which records nothing by itself."""
    hvd.init()
    yield Training()
    hvd.shutdown()


def steps_of(run: Run) -> list[int]:
    return [step.report.step for step in run.first.steps]


def recover(training: Training, steps: int) -> None:
    """Take so many steps, fail, and be called again."""

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.attempts += 1
        state.commit()
        training.take(steps)
        if state.attempts == 1:
            raise hvd.HorovodInternalError("a hiccup")

    train(hvd.elastic.TorchState(training.model, training.optimizer, attempts=0))


def test_what_a_script_asked_for_is_recorded_after_a_recovery_too(
    tmp_path: Path, training: Training
) -> None:
    gtopk.record(str(tmp_path), every=2, prometheus="0")
    before = world.current()
    recover(training, 5)
    assert world.current() is not before
    assert world.current().recordings == before.recordings
    assert before.recordings.prometheus == Address("127.0.0.1", 0)
    training.take(1)
    gtopk.log(loss=0.5)
    hvd.shutdown()
    hvd.init()
    run = read_run(tmp_path)
    assert len(run.first.steps) > 5
    assert [note.content for note in run.first.values] == [{"loss": 0.5}]
    assert world.current().recorder is None  # what the script asked for was of that world


def test_where_one_cannot_be_opened_what_was_opened_before_is_closed(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gtopk.record(prometheus="0")
    (endpoint,) = world.current().recorder._sinks
    port = str(endpoint.address.port)
    monkeypatch.setattr("gtopk.recording.start.Scalars", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gtopk.record(prometheus=port, tensorboard=str(tmp_path))
    gtopk.record(prometheus=port)
    assert world.current().recorder is not None
