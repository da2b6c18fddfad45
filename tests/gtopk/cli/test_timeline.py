"""Merging the traces of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import Transport
from gtopk.cli.timeline import main, read_traces
from gtopk.runtime.coordinator.clocks import Offset
from gtopk.runtime.world import world
from gtopk.telemetry.timeline import Span, Step, Timeline, TraceSource, path_of


def write_traces(folder: Path, ranks: int, run: float = 1.7e9) -> None:
    """Write a trace of a simultaneous step for each rank, with clocks 5 seconds apart."""
    for rank in range(ranks):
        source = TraceSource(rank, ranks, run, Offset(5.0 * rank, 1e-4 * rank))
        timeline = Timeline(str(path_of(folder, rank)), "mpi", False, source)
        moment = 1e5 + 5.0 * rank
        spans = [
            Span("BACKWARD", moment, moment + 0.1),
            Span("SYNCHRONIZE", moment + 0.1, moment + 0.15),
        ]
        timeline.note_step(Step("gradients.w", spans, 0.04, 0.01))
        timeline.close()


def test_simultaneous_steps_are_aligned_across_ranks(tmp_path: Path, capsys) -> None:
    write_traces(tmp_path, 3)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    assert ": 3 ranks, " in printed
    assert printed.endswith(", clocks equal to within 200 µs\n")
    records = json.loads((tmp_path / "timeline.json").read_text())
    steps = {r["pid"]: r["ts"] for r in records if r.get("name") == "BACKWARD"}
    assert sorted(steps) == [0, 1, 2]
    # The rounding is 0.1 us; the times at which ranks opened their files add more.
    assert max(steps.values()) - min(steps.values()) == pytest.approx(0, abs=1)
    names = [r["args"]["name"] for r in records if r.get("name") == "process_name"]
    assert [name.split()[:2] for name in names] == [["rank", "0"], ["rank", "1"], ["rank", "2"]]
    threads = {r["args"]["name"] for r in records if r.get("name") == "thread_name"}
    assert threads == {"steps of w"}
    elsewhere = tmp_path / "merged" / "trace.json"  # its folder is created
    assert main([str(tmp_path), "--out", str(elsewhere)]) == 0
    assert json.loads(elsewhere.read_text()) == records


def test_each_optimizer_of_a_rank_has_its_own_counter(tmp_path: Path) -> None:
    timeline = Timeline(str(path_of(tmp_path, 0)), "mpi", False, TraceSource(0, 1, 1.7e9, Offset()))
    for name in ("gradients.w", "gradients.v", "gradients.w"):
        timeline.note_step(Step(name, [Span("BACKWARD", 1.0, 1.1)], 0.04, 0.01))
    timeline.close()
    assert main([str(tmp_path)]) == 0
    records = json.loads((tmp_path / "timeline.json").read_text())
    counters = [r["name"] for r in records if r.get("ph") == "C"]
    assert counters == [f"exchange in steps of {name}" for name in "wvw"]


def test_truncated_trace_is_read_as_far_as_it_goes(tmp_path: Path, capsys) -> None:
    write_traces(tmp_path, 2)
    path = path_of(tmp_path, 1)
    path.write_text(path.read_text()[:-30])
    assert main([str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ranks"] == [0, 1]
    assert printed["clocks_within_seconds"] == 1e-4


def test_records_of_other_programs_are_skipped(tmp_path: Path, capsys) -> None:
    write_traces(tmp_path, 1)
    assert main([str(tmp_path), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["records"]
    path = path_of(tmp_path, 0)
    others = ['{"foo": 1}', '{"ph": "X", "ts": "now"}', '{"ph": 1}', '{"ph": "M", "name": 5}']
    path.write_text(path.read_text().replace("{}", ",\n".join(["{}", *others]), 1))
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == expected


def test_traces_of_an_earlier_run_are_omitted_and_named(tmp_path: Path, capsys) -> None:
    write_traces(tmp_path, 4)
    write_traces(tmp_path, 2, run=1.7e9 + 2)
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert ": 2 ranks, " in out
    assert err == "gtopk timeline: left out ranks 2, 3, from an earlier run\n"
    records = json.loads((tmp_path / "timeline.json").read_text())
    assert {record["pid"] for record in records} == {0, 1}


def test_missing_trace_is_counted(tmp_path: Path, capsys) -> None:
    write_traces(tmp_path, 3)
    path_of(tmp_path, 1).unlink()
    assert main([str(tmp_path)]) == 0
    assert ": 2 of 3 ranks, " in capsys.readouterr().out


def test_all_ranks_of_a_run_record_the_same_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads
) -> None:
    monkeypatch.setenv("GTOPK_TIMELINE", str(tmp_path))

    def run(transport: Transport) -> None:
        with world.entered(transport) as here:
            here.observe()

    begun = []
    for ranks in (3, 3, 2):
        threads(ranks, run)
        begun.append([trace.run for trace in read_traces(tmp_path)])
    assert [len(set(runs)) for runs in begun] == [1, 1, 2]
    assert begun[0][0] < begun[1][0] < begun[2][0]


def test_timeline_variable_sets_the_folder_of_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_TIMELINE", str(tmp_path / "traces"))
    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")
    hvd.shutdown()
    assert main([str(tmp_path / "traces")]) == 0
    records: list[dict[str, Any]] = json.loads((tmp_path / "traces/timeline.json").read_text())
    assert {r["pid"] for r in records} == {0}
    assert any(r.get("name") == "LOCAL_ALLREDUCE" for r in records)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "`gtopk run --timeline FOLDER`, or with GTOPK_TIMELINE=FOLDER"),
        ("[\n{}\n]\n", "does not name its rank"),
        ('[\n{"name": "gtopk_rank"}\n]\n', "does not name its rank"),
        ('[\n{"name": "gtopk_rank", "args": {"rank": 0}}\n]\n', "does not name its rank"),
        ('[\n{"name": "gtopk_rank", "args": {"rank": 1e999}}\n]\n', "does not name its rank"),
    ],
)
def test_traces_that_cannot_be_merged_exit_with_the_reason(
    tmp_path: Path, capsys, content: str | None, text: str
) -> None:
    if content is not None:
        path_of(tmp_path, 0).write_text(content)
    assert main([str(tmp_path)]) == 1
    assert text in capsys.readouterr().err
