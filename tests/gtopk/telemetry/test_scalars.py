"""TensorBoard gets the record's values, under its names, at their steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gtopk
import gtopk.torch as hvd
from gtopk.runtime.world import world
from gtopk.telemetry.lines import step_line
from gtopk.telemetry.sinks import Scalars
from tests.gtopk.made_runs import begin, report

Found = dict[str, list[tuple[int, float]]]


class Writers:
    """A fake SummaryWriter that records folders and calls."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.found: Found = {}
        self.flushed = self.closed = 0

    def __call__(self, folder: str) -> Writers:
        self.folders.append(folder)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found.setdefault(name, []).append((step, value))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Writers:
    writers = Writers()
    fake_module = SimpleNamespace(SummaryWriter=writers)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake_module)
    return writers


def read_events(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@pytest.fixture(params=["a fake writer", "tensorboard"])
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Found]:
    """Return a function that returns the scalars in the folder."""
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
        return lambda: read_events(tmp_path)
    writers: Writers = request.getfixturevalue("writers")
    return lambda: writers.found


def test_each_line_becomes_scalars_of_its_step(tmp_path: Path, found: Callable[[], Found]) -> None:
    round_ = report(
        7, covers="round", local_steps=4, samples=None, coded_entries=0, predicted_seconds=None
    )
    at = {"seconds": 1.0, "step": 8}
    scalars = Scalars(str(tmp_path))
    scalars.take([begin(), step_line(report(4), 0.5, 6000, 160), step_line(round_, 0.9, 7200, 160)])
    scalars.take(
        [
            {"what": "values", **at, "values": {"loss": 0.25, "accuracy": 0.5}},
            {"what": "withheld", **at, "norm": 2.5, "age_steps": 30.0},
            {"what": "withheld", **at, "norm": 3.5, "age_steps": None},
            {"what": "message", **at, "level": "INFO", "text": "advice"},
            {"what": "end", **at, "how": "called shutdown()"},
        ]
    )
    scalars.close()
    seconds = {
        "compute": 0.006,
        "wait": 0.001,
        "select": 0.0012,
        "pack": 0.0003,
        "exchange": 0.0011,
        "merge": 0.0004,
    }
    expected = {
        **{f"gtopk seconds/{part}": [(4, each), (7, each)] for part, each in seconds.items()},
        "gtopk/sent bytes": [(4, 1200), (7, 1200)],
        "gtopk/sent bytes so far": [(4, 6000), (7, 7200)],
        "gtopk/hidden seconds": [(4, 0), (7, 0)],
        "gtopk/density": [(4, 0.001), (7, 0.001)],
        "gtopk/bits per entry": [(4, 48)],
        "gtopk/samples": [(4, 32)],
        "gtopk/local steps": [(7, 4)],
        "gtopk/exchange, predicted seconds": [(4, 0.0025)],
        "gtopk/exchange, measured seconds": [(4, 0.003)],
        "loss": [(8, 0.25)],
        "accuracy": [(8, 0.5)],
        "gtopk/residual norm": [(8, 2.5), (8, 3.5)],
        "gtopk/residual age, steps": [(8, 30)],
    }
    scalars_found = found()
    assert set(scalars_found) == set(expected)
    for name, points in expected.items():
        assert scalars_found[name] == [(step, pytest.approx(each)) for step, each in points], name


def test_only_rank_0_writes_scalars_and_flushes_before_it_leaves(
    tmp_path: Path, writers: Writers, threads: Callable[..., Any]
) -> None:
    def program(transport: Any) -> None:
        with world.entered(transport) as here:
            gtopk.record(tensorboard=str(tmp_path))
            here.step = 3
            gtopk.log(loss=0.5)

    threads(2, program)
    assert writers.folders == [str(tmp_path)]
    assert writers.found == {"loss": [(3, 0.5)]}
    assert writers.flushed > 0
    assert writers.closed == 1


def test_missing_tensorboard_raises_in_script_and_warns_from_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install tensorboard"):
        Scalars(str(tmp_path))
    monkeypatch.setenv("GTOPK_TENSORBOARD", str(tmp_path))
    hvd.init()
    hvd.shutdown()
    assert "rank 0 trains without the sink of GTOPK_TENSORBOARD" in caplog.text
