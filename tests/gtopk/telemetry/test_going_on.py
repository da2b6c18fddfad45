"""The record of a resumed run: in a new world, from a checkpoint, or from a script's own step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk.runtime.world import world
from gtopk.settings import Address
from gtopk.telemetry import run_record
from gtopk.telemetry.reading import Run, read_run
from gtopk.telemetry.run_record import recorder_of, settings_of


class Training:
    """A model of two weights and its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.distribute()

    def distribute(self) -> None:
        """Wrap a new optimizer, as needed in a new world."""
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters())

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()


@pytest.fixture
def training() -> Iterator[Training]:
    """Start a world of one rank without a recorder."""
    hvd.init()
    yield Training()
    hvd.shutdown()


def recorded(folder: Path) -> Run:
    """Return the record so far."""
    if world.is_initialized() and (recorder := recorder_of(world.current())) is not None:
        recorder.flush()
    return read_run(folder)


def steps_of(run: Run) -> list[int]:
    return [step.report.step for step in run.first.steps]


def test_run_resumed_from_checkpoint_is_one_run_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_RUN", str(tmp_path / "run"))
    for epoch in range(2):  # this script counts only epochs
        hvd.init()
        training = Training()
        found = gtopk.load_latest(tmp_path / "saved", training.model, training.optimizer)
        assert (found.step if found else 0) == epoch
        training.take(5)
        gtopk.save_checkpoint(
            tmp_path / "saved", training.model, training.optimizer, step=epoch + 1
        )
        hvd.shutdown()
    assert steps_of(recorded(tmp_path / "run")) == list(range(10))


def test_run_recorded_late_is_a_separate_run(
    tmp_path: Path, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.take(3)
    gtopk.record(str(tmp_path))
    training.take(5)
    assert steps_of(recorded(tmp_path)) == list(range(3, 8))
    hvd.shutdown()
    run_record._written.clear()  # as in another process
    hvd.init()
    training.distribute()
    training.take(6)
    with caplog.at_level("INFO", "gtopk"):
        gtopk.record(str(tmp_path))
    assert "holds the record of an earlier run" in caplog.text
    training.take(2)
    run = recorded(tmp_path)
    assert steps_of(run) == [6, 7]
    assert run.earlier_runs == 1


def test_record_continues_if_reopened_or_begun_after_a_resume(
    tmp_path: Path, training: Training
) -> None:
    first, other, saved = str(tmp_path / "first"), str(tmp_path / "other"), tmp_path / "saved"
    for folder in (first, other, first):
        gtopk.record(folder)
        training.take(3)
    gtopk.save_checkpoint(saved, training.model, training.optimizer, step=1)
    hvd.shutdown()
    hvd.init()
    training.distribute()
    assert gtopk.load_latest(saved, training.model, training.optimizer) is not None
    training.take(1)
    gtopk.record(first)
    training.take(1)
    assert steps_of(recorded(Path(first))) == [0, 1, 2, 6, 7, 8, 10]
    assert steps_of(recorded(Path(other))) == [3, 4, 5]


def train_in_batches(training: Training, batches: int, fails_before: int) -> None:
    """Commit after every third batch, and fail once."""
    failed = False

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal failed
        while state.batches < batches:
            if state.batches == fails_before and not failed:
                failed = True
                raise hvd.HorovodInternalError("a hiccup")
            training.take(1)
            state.batches += 1
            gtopk.log(batches=state.batches)
            if state.batches % 3 == 0:
                state.commit()

    train(hvd.elastic.TorchState(training.model, training.optimizer, batches=0))


@pytest.mark.parametrize("requested_by", ["the environment", "the script"])
def test_steps_repeated_after_recovery_are_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested_by: str
) -> None:
    if requested_by == "the environment":
        monkeypatch.setenv("GTOPK_RUN", str(tmp_path))
    hvd.init()
    if requested_by == "the script":
        gtopk.record(str(tmp_path))
    train_in_batches(Training(), 8, fails_before=5)
    assert world.current().step == 8
    hvd.shutdown()
    (rank,) = read_run(tmp_path).ranks
    assert [step.report.step for step in rank.steps] == list(range(8))
    assert [note.content for note in rank.values] == [{"batches": n} for n in range(1, 9)]


def test_next_job_continues_step_numbers_from_elastic_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path / "commits"))
    for batches in (8, 16):  # the first job's last two are not committed
        hvd.init()
        train_in_batches(Training(), batches, fails_before=batches - 3)
        assert world.current().step == batches
        hvd.shutdown()
    assert steps_of(recorded(tmp_path / "run")) == list(range(16))


def test_recorder_settings_of_the_script_survive_recovery(
    tmp_path: Path, training: Training
) -> None:
    gtopk.record(str(tmp_path), every=2, prometheus="0")
    before = world.current()
    train_in_batches(training, 8, fails_before=5)
    assert world.current() is not before
    assert settings_of(world.current()) == settings_of(before)
    assert settings_of(before).prometheus == Address("127.0.0.1", 0)
    hvd.shutdown()
    hvd.init()
    assert recorder_of(world.current()) is None  # the script requested it in that world


def test_sinks_opened_before_a_failing_one_are_closed(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gtopk.record(prometheus="0")
    (endpoint,) = recorder_of(world.current())._sinks
    port = str(endpoint.address.port)
    monkeypatch.setattr("gtopk.telemetry.run_record.Scalars", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gtopk.record(prometheus=port, tensorboard=str(tmp_path))
    gtopk.record(prometheus=port)
    assert recorder_of(world.current()) is not None
