"""Weights & Biases and MLflow get the record's values in one run, for any number of ranks."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gtopk
from gtopk.runtime.world import world
from gtopk.telemetry import Line, run_record, scalars_of
from gtopk.telemetry.lines import step_line
from gtopk.telemetry.sinks import MLflow, Wandb
from tests.gtopk.made_runs import begin, report

LINES = [
    begin(),
    step_line(report(4), 0.5, 6000, 160),
    {"what": "withheld", "seconds": 0.6, "step": 5, "norm": 2.5, "age_steps": None},
    {"what": "values", "seconds": 0.6, "step": 5, "values": {"loss": 0.25}},
]


class FakeWandb:
    """A fake of wandb and its run that records calls."""

    def __init__(self, run: Any = None) -> None:
        self.run = run
        self.begun: list[str] = []
        self.axes: dict[str, str] = {}
        self.rows: list[dict[str, float]] = []
        self.finished: list[int] = []  # exit codes

    def init(self, project: str) -> FakeWandb:
        self.begun.append(project)
        return self

    def define_metric(self, names: str, step_metric: str) -> None:
        self.axes[names] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


class FakeMLflow:
    """A fake of mlflow and its client that records calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metrics: list[Any] = []
        self.ended: list[str] = []
        mlflow: Any = ModuleType("mlflow")
        mlflow.MlflowClient, mlflow.active_run = lambda: self, lambda: None
        mlflow.set_experiment = lambda name: SimpleNamespace(experiment_id="e")
        entities: Any = ModuleType("mlflow.entities")
        entities.Metric = lambda *fields: fields
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)

    def create_run(self, experiment: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        self.metrics += metrics

    def set_terminated(self, run: str, status: str) -> None:
        self.ended.append(status)


def test_wandb_logs_each_line_as_a_row_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = Wandb("p")
    sink.take(LINES)
    sink.close()
    assert wandb.begun == ["p"]
    assert wandb.axes == {"gtopk/*": "gtopk/step", "gtopk seconds/*": "gtopk/step"}
    step, residual, values = wandb.rows
    assert step == {**dict(scalars_of(LINES[1])), "gtopk/step": 4}
    assert {"gtopk/sent bytes", "gtopk seconds/wait"} <= set(step)
    assert residual == {"gtopk/residual norm": 2.5, "gtopk/step": 5}
    assert values == {"loss": 0.25, "gtopk/step": 5}
    assert wandb.finished == [0]


def test_wandb_run_begun_by_the_script_is_used_and_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FakeWandb()
    wandb = FakeWandb(run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = Wandb("p")
    sink.take(LINES)
    sink.close()
    assert wandb.begun == []
    assert len(run.rows) == 3
    assert run.finished == []


@pytest.mark.parametrize("sink", [Wandb, MLflow])
def test_missing_tracker_package_raises_with_install_command(
    sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, sink.__name__.lower(), None)
    with pytest.raises(ImportError, match=f"pip install {sink.__name__.lower()}"):
        sink("p")


def test_only_rank_0_has_the_wandb_run_and_each_rank_its_own_sinks(
    monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    class OwnSink:
        name = "own_sink"

        def __init__(self) -> None:
            self.lines: list[Line] = []
            self.closed = False

        def take(self, lines: Any) -> None:
            self.lines += lines

        def close(self) -> None:
            self.closed = True

    def program(transport: Any) -> OwnSink:
        own_sink = OwnSink()
        with world.entered(transport) as here:
            gtopk.record(wandb="p", sinks=[own_sink])
            here.step = 3
            gtopk.log(loss=0.5 + transport.rank)
        return own_sink

    sinks = threads(2, program)
    assert wandb.begun == ["p"]
    assert wandb.rows == [{"loss": 0.5, "gtopk/step": 3}]
    for rank, own_sink in enumerate(sinks):
        assert [line["what"] for line in own_sink.lines][:2] == ["begin", "values"]
        assert own_sink.lines[1]["values"] == {"loss": 0.5 + rank}
        assert own_sink.closed


class FakeWorld:
    """The parts of a world that a recorder uses."""

    resumed, local_rank, size, step = False, 0, 2, 0
    transport = SimpleNamespace(link_text="")

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeWandb, FakeMLflow]:
    """Return fakes of wandb and mlflow's client, enabled in the environment."""
    wandb, client = FakeWandb(), FakeMLflow(monkeypatch)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("GTOPK_WANDB", "p")
    monkeypatch.setenv("GTOPK_MLFLOW", "e")
    monkeypatch.setattr(run_record, "_begin", lambda world, began: LINES[0])
    return wandb, client


@pytest.mark.parametrize("rank", [0, 1])
def test_tracker_run_survives_recovery_unless_its_rank_is_no_longer_0(
    rank: int, fakes: tuple[FakeWandb, FakeMLflow]
) -> None:
    wandb, client = fakes
    worlds: Any = [FakeWorld(0), FakeWorld(rank)]
    observer = run_record._WorldRecords()
    for here, before in zip(worlds, (None, worlds[0]), strict=True):
        assert observer.join(here, before)
        observer.start(here)
        if recorder := run_record.recorder_of(here):
            recorder.note("values", values={"loss": 0.5})
        if before is None:
            observer.pause(here)  # an elastic job restarts
    assert wandb.begun == ["p"]
    assert len([row for row in wandb.rows if "loss" in row]) == 1
    assert (wandb.finished, client.ended) == (([], []) if rank == 0 else ([0], ["FINISHED"]))
    observer.end(worlds[1], "the program ended", True)
    observer.pause(worlds[1])
    assert (wandb.finished, client.ended) == ([0], ["FINISHED"])
    assert len([row for row in wandb.rows if "loss" in row]) == 2 - rank


def test_sent_bytes_continue_after_a_recovery(fakes: tuple[FakeWandb, FakeMLflow]) -> None:
    wandb, client = fakes
    worlds: Any = [FakeWorld(0), FakeWorld(0)]
    observer = run_record._WorldRecords()
    for here, before in zip(worlds, (None, worlds[0]), strict=True):
        observer.join(here, before)
        observer.start(here)
        recorder = run_record.recorder_of(here)
        assert recorder is not None
        for step in range(2):
            recorder.note_step(report(step))
        observer.pause(here)
    observer.end(worlds[1], "the program ended", True)
    name = "gtopk/sent bytes so far"
    each = report(0).sent_bytes
    assert [row[name] for row in wandb.rows if name in row] == [each * n for n in (1, 2, 3, 4)]
    logged = [value for metric, value, *_ in client.metrics if metric == name]
    assert logged == [each * n for n in (1, 2, 3, 4)]


def test_tracker_runs_fail_if_the_next_world_never_forms(
    fakes: tuple[FakeWandb, FakeMLflow],
) -> None:
    wandb, client = fakes
    first, second = (FakeWorld(0) for _ in range(2))
    observer: Any = run_record._WorldRecords()
    observer.join(first, None)
    observer.start(first)
    observer.pause(first)
    observer.join(second, first)  # without a meeting of its ranks
    observer.end(first, "could not rejoin", False)
    assert (wandb.finished, client.ended) == ([1], ["FAILED"])


def test_failed_rejoin_notes_an_abnormal_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[str, bool]] = []

    class Left:
        """A world after all ranks have left."""

        failures: tuple[str, ...] = ()
        advice, sets, step = "", {}, 3

        def __init__(self) -> None:
            self.engine = SimpleNamespace(failure=None)
            self.transport = SimpleNamespace(timeout_seconds=1.0, lost=list)

        def leave(self, reason: str, seconds: float) -> list[int]:
            return []

        def pause(self) -> None:
            pass

        def note_end(self, how: str, in_order: bool) -> None:
            ends.append((how, in_order))

    def fail(*call: Any) -> None:
        raise OSError("no route to rank 1")

    module = sys.modules[world.rejoin.__module__]
    guard = SimpleNamespace(departure_notice=str, remove=lambda: None)
    monkeypatch.setattr(module, "_process", Left())
    monkeypatch.setattr(module, "_guard", guard)
    monkeypatch.setattr(module, "current", lambda: module._process)
    monkeypatch.setattr(module, "_init", fail)
    with pytest.raises(OSError, match="no route"):
        world.rejoin()
    assert ends == [("could not rejoin: OSError: no route to rank 1", False)]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("loss", "loss"),
        ("val/top-1 acc.", "val/top-1 acc."),
        ("gtopk/exchange, measured seconds", "gtopk/exchange measured seconds"),
        ("acc@1 (%)", "acc_1 ___"),
        ("/a//b/", "a/b"),
        ("../..", "_"),
    ],
)
def test_mlflow_metric_names_are_made_valid(
    name: str, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeMLflow(monkeypatch)
    MLflow("e").take([{"what": "values", "seconds": 0.6, "step": 5, "values": {name: 0.5}}])
    ((logged_name, value, _, step),) = client.metrics
    assert (logged_name, value, step) == (metric, 0.5, 5)


@pytest.mark.parametrize(
    ("end", "code", "status"),
    [
        ({"how": "the program ended", "in_order": True}, 0, "FINISHED"),
        ({"how": "ValueError: no such file", "in_order": False}, 1, "FAILED"),
    ],
)
def test_tracker_run_ends_with_the_status_of_its_rank(
    end: Any, code: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, client = FakeWandb(), FakeMLflow(monkeypatch)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for sink in (Wandb("p"), MLflow("e")):
        sink.take([*LINES, {"what": "end", "seconds": 0.7, "step": 5, **end}])
        sink.close()
    assert wandb.finished == [code]
    assert client.ended == [status]


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_stores_every_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: make test-adapters")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    sink = MLflow("e")
    odd = {"what": "values", "seconds": 0.6, "step": 5, "values": {"acc@1 (%)": 0.5, "/a//b": 1.0}}
    sink.take([*LINES, odd])
    sink.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED"
    found = dict(scalars_of(LINES[1])) | {"gtopk/residual norm": 2.5, "loss": 0.25}
    expected = {name.replace(",", ""): value for name, value in found.items()}
    assert run.data.metrics == {**expected, "acc_1 ___": 0.5, "a/b": 1.0}
    (point,) = client.get_metric_history(run.info.run_id, "gtopk/sent bytes")
    assert (point.value, point.step) == (1200, 4)


def test_two_ranks_share_one_offline_wandb_run(torchrun: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: make test-adapters")
    job = torchrun(2, "trackers.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    (run,) = tmp_path.glob("wandb/offline-run-*")
    rows = list(history(next(run.glob("run-*.wandb")).read_bytes()))
    names = {name for row in rows for name in row}
    assert {"gtopk/sent bytes", "gtopk seconds/wait", "gtopk/residual norm"} <= names
    steps = [json.loads(row["gtopk/step"]) for row in rows if "gtopk/sent bytes" in row]
    assert steps == [0, 1, 2, 3]


def history(content: bytes) -> Iterator[dict[str, str]]:
    """Yield the rows of a run's file: records in LevelDB's log format after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    place, block, record_bytes = 7, 1 << 15, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # no header fits
            place += block - place % block
            continue
        size, part = struct.unpack_from("<HB", content, place + 4)
        record_bytes += content[place + 7 : place + 7 + size]
        place += 7 + size
        if part in (1, 4):  # a whole record, or its end
            record = wandb_internal_pb2.Record()
            record.ParseFromString(record_bytes)
            record_bytes = b""
            if record.HasField("history"):
                items = record.history.item
                yield {i.key or ".".join(i.nested_key): i.value_json for i in items}
