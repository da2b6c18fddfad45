"""The timeline is JSON that Chrome can show at any moment."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from gtopk.runtime.coordinator import Event
from gtopk.runtime.world import world
from gtopk.telemetry import timeline
from gtopk.telemetry.timeline import Timeline
from tests.gtopk.traces_read import records_in, rows_in

PLENTY_SECONDS = 30.0


def events(name: str, *parts: str) -> list[Event]:
    """Return the events as short texts, such as "begin negotiate" or "ready 2"."""
    made = []
    for part in parts:
        first, second = part.split()
        if first == "ready":
            made.append(Event("mark", "ready", name, time.perf_counter(), int(second)))
        else:
            made.append(Event(first, second, name, time.perf_counter()))  # type: ignore[arg-type]
    return made


FUSED = (
    *("begin negotiate", "ready 0", "ready 2", "ready 1", "end negotiate", "begin execute"),
    *("begin copy-in", "end copy-in", "begin reduce", "end reduce", "begin copy-out"),
    *("end copy-out", "end execute"),
)


@pytest.mark.parametrize(
    ("transport", "library"),
    [("mpi", "MPI"), ("torch.distributed", "GLOO"), ("nccl", "NCCL"), ("local", "LOCAL")],
)
def test_operation_has_a_row_with_horovods_activity_names(
    tmp_path: Path, transport: str, library: str
) -> None:
    recorder = Timeline(str(tmp_path / "trace"), transport, mark_cycles=False)
    for event in events("allreduce.weight", *FUSED):
        recorder.note("", event)
    recorder.close()
    assert rows_in(tmp_path / "trace") == {
        "allreduce.weight": [
            *(">NEGOTIATE_ALLREDUCE", "0", "2", "1", "<", ">ALLREDUCE"),
            *(">MEMCPY_IN_FUSION_BUFFER", "<", f">{library}_ALLREDUCE", "<"),
            *(">MEMCPY_OUT_FUSION_BUFFER", "<", "<"),
        ]
    }
    times = [record["ts"] for record in records_in(tmp_path / "trace") if "ts" in record]
    assert times == sorted(times)
    assert times[0] >= 0


def test_trace_file_is_valid_json_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = Timeline(str(path), "mpi", mark_cycles=False)
    assert records_in(path) == []
    for number in range(20):
        recorder.note("", events(f"broadcast.{number}", "begin negotiate")[0])
        deadline = time.monotonic() + PLENTY_SECONDS
        while len(rows_in(path)) <= number:
            assert time.monotonic() < deadline
    recorder.close()
    assert rows_in(path) == {f"broadcast.{n}": [">NEGOTIATE_BROADCAST"] for n in range(20)}


def test_activities_begun_before_the_timeline_are_omitted(tmp_path: Path) -> None:
    recorder = Timeline(str(tmp_path / "trace"), "mpi", mark_cycles=False)
    for event in events("allgather.x", "ready 1", "end negotiate", "begin execute", "end execute"):
        recorder.note("", event)
    recorder.close()
    assert rows_in(tmp_path / "trace") == {"allgather.x": ["1", ">ALLGATHER", "<"]}


@pytest.mark.parametrize("mark_cycles", [False, True])
def test_cycles_are_marked_if_requested(tmp_path: Path, mark_cycles: bool) -> None:
    recorder = Timeline(str(tmp_path / "trace"), "mpi", mark_cycles)
    recorder.note("", Event("mark", "cycle", "", time.perf_counter()))
    recorder.close()
    names = [record["name"] for record in records_in(tmp_path / "trace")]
    assert names == ["CYCLE_START"] * mark_cycles


# ---- of a world


def test_step_shows_exchange_time_hidden_behind_backward(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    path = tmp_path / "trace"

    def program(transport: Any) -> tuple[float, float]:
        with world.entered(transport) as here:
            timeline.start(here, str(path))
            layers = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(4)))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layers.parameters(), lr=0.1),
                layers.named_parameters(),
                bucket_bytes=3000,
            )
            for _ in range(2):
                layers(torch.ones(2, 30)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            timeline.stop(here)
            step = optimizer.last_step
            return step.hidden_seconds, step.working_seconds

    (hidden, working), _ = threads(2, program)
    assert rows_in(path)["steps of 0.bias"] == ["BACKWARD", "SYNCHRONIZE"] * 2
    counters = [record["args"] for record in records_in(path) if record["ph"] == "C"]
    assert len(counters) == 2
    assert counters[1]["hidden ms"] == pytest.approx(1e3 * hidden)
    assert sum(counters[1].values()) == pytest.approx(1e3 * working)
    spans = [record for record in records_in(path) if record.get("name") == "BACKWARD"]
    assert all(record["dur"] > 0 for record in spans)


@pytest.mark.parametrize("size", [1, 2])
def test_unobserved_backward_pass_is_not_drawn(
    tmp_path: Path, threads: Callable[..., Any], size: int
) -> None:
    """A single rank observes none, and scripts may set gradients themselves."""
    path = tmp_path / "trace"

    def program(transport: Any) -> None:
        with world.entered(transport) as here:
            timeline.start(here, str(path))
            layer = torch.nn.Linear(3, 3, bias=False)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters()
            )
            for is_seen in (size > 1, False):
                if is_seen or size == 1:
                    layer(torch.ones(2, 3)).sum().backward()
                else:
                    layer.weight.grad = torch.ones(3, 3)
                optimizer.step()
                optimizer.zero_grad()
            timeline.stop(here)

    threads(size, program)
    seen = ["BACKWARD"] if size > 1 else []
    assert rows_in(path)["steps of weight"] == [*seen, "SYNCHRONIZE", "SYNCHRONIZE"]
    assert all(record["ts"] >= 0 for record in records_in(path) if "ts" in record)


def test_rank_0_records_operations_of_all_ranks(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    path = tmp_path / "trace"

    def program(transport: Any) -> None:
        with world.entered(transport) as here:
            hvd.allreduce(torch.ones(1), name="before")
            timeline.start(here, str(path))
            hvd.allreduce(torch.ones(1), name="within")
            timeline.stop(here)
            hvd.allreduce(torch.ones(1), name="after")

    threads(3, program)
    rows = rows_in(path)
    assert list(rows) == ["allreduce.within"]
    (row,) = rows.values()
    assert row[0] == ">NEGOTIATE_ALLREDUCE"
    assert sorted(mark for mark in row if mark.isdigit()) == ["0", "1", "2"]
    assert ">ALLREDUCE" in row[row.index("<") :]
    assert sum(mark[0] == ">" for mark in row) == row.count("<")


def test_process_set_has_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Callable[..., Any]
) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def program(transport: Any) -> None:
        with world.entered(transport) as here:
            early = hvd.add_process_set([0, 2])
            timeline.start(here, str(tmp_path / "trace"))
            late = hvd.add_process_set([0, 1])
            for ranks in (early, late):
                if ranks.included():
                    hvd.allreduce(torch.ones(1), name="x", process_set=ranks)
            hvd.allreduce(torch.ones(1), name="x")

    threads(3, program)
    rows = rows_in(tmp_path / "trace")
    for number, members in (1, "02"), (2, "01"):
        row = rows[f"allreduce.x (process set {number})"]
        assert sorted(mark for mark in row if mark.isdigit()) == [*members]
    assert sorted(mark for mark in rows["allreduce.x"] if mark.isdigit()) == ["0", "1", "2"]


def test_second_start_closes_the_first_file(tmp_path: Path) -> None:
    hvd.init()
    timeline.start(world.current(), str(tmp_path / "first"))
    hvd.allreduce(torch.ones(1), name="one")
    timeline.start(world.current(), str(tmp_path / "second"))
    hvd.allreduce(torch.ones(1), name="two")
    hvd.shutdown()
    assert list(rows_in(tmp_path / "first")) == ["allreduce.one"]
    assert list(rows_in(tmp_path / "second")) == ["allreduce.two"]


def test_second_start_replaces_the_content_of_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Timeline._append

    def append_late(self: Timeline, records: list[dict[str, Any]]) -> None:
        time.sleep(0.05)  # the first timeline still writes when the second is started
        append(self, records)

    monkeypatch.setattr(Timeline, "_append", append_late)
    hvd.init()
    timeline.start(world.current(), str(tmp_path / "trace"))
    hvd.allreduce(torch.ones(1), name="one" * 99)
    timeline.start(world.current(), str(tmp_path / "trace"))
    hvd.allreduce(torch.ones(1), name="two")
    hvd.shutdown()
    assert list(rows_in(tmp_path / "trace")) == ["allreduce.two"]


@pytest.mark.parametrize(("setting", "cycles"), [("", False), ("1", True), ("0", False)])
def test_environment_sets_the_trace_file_and_cycle_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, cycles: bool
) -> None:
    path = tmp_path / "trace"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", setting)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="x")
    hvd.shutdown()
    assert "allreduce.x" in rows_in(path)
    assert any(record.get("name") == "CYCLE_START" for record in records_in(path)) == cycles


def test_dynamic_timeline_writes_nothing_until_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "warning"),
    [
        ("HOROVOD_TIMELINE", "HOROVOD_TIMELINE must name a file to write, got "),
        ("GTOPK_TIMELINE", "GTOPK_TIMELINE must name a folder to write to, got "),
    ],
)
def test_unwritable_trace_warns_and_the_job_continues(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    variable: str,
    warning: str,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "trace"))
    hvd.init()
    hvd.shutdown()
    assert len([text for text in caplog.messages if text.startswith(warning)]) == 1


@pytest.mark.parametrize("fits", [0, 10, None])
def test_full_disk_ends_the_trace_but_not_the_job(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    fits: int | None,
) -> None:
    """No bytes of a write fit, or only some, or the system refuses it."""
    path = tmp_path / "trace"
    recorder = Timeline(str(path), "mpi", mark_cycles=False)
    recorder.note("", events("broadcast.0", "begin negotiate")[0])
    deadline = time.monotonic() + PLENTY_SECONDS
    while not rows_in(path):
        assert time.monotonic() < deadline
    pwrite, refused = os.pwrite, threading.Event()

    def full(file: int, data: bytes, offset: int) -> int:
        if len(data) < 10:
            return pwrite(file, data, offset)
        refused.set()
        if fits is None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return pwrite(file, data[:fits], offset)

    monkeypatch.setattr(os, "pwrite", full)
    recorder.note("", events("broadcast.1", "begin negotiate")[0])
    assert refused.wait(PLENTY_SECONDS)
    recorder.note("", events("broadcast.2", "begin negotiate")[0])
    recorder.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the timeline stopped ([Errno ")
    assert rows_in(path) == {"broadcast.0": [">NEGOTIATE_BROADCAST"]}
