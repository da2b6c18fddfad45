"""`gtopk top` shows the ranks' states as text and as JSON."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest

from gtopk.cli.top import RECENT, _snapshots, as_lines, main, rows, status_of
from gtopk.telemetry.lines import as_text, path_of, step_line
from gtopk.telemetry.reading import Reader, read_run
from gtopk.telemetry.run_record import LineFile
from tests.gtopk.made_runs import begin, diverge, lines_of, report, write_run

THREE_UP, CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[3A", "\x1b[?25l", "\x1b[?25h"


def without_controls(drawn: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", drawn)


def test_top_prints_a_line_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, ranks=3, steps=80)
    assert main([str(tmp_path), "--once"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["rank", "host", "step", "steps/s"]
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert all("60 %" in line and line.endswith("ended") for line in lines)
    assert all(line.split()[3] == "100" for line in lines)  # steps a second
    scores = [line[head.index("score") :].split()[0] for line in lines]
    assert scores == ["1", "0.5", "0.33"]
    assert "\x1b" not in "".join(lines)


def test_json_prints_one_object_per_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, ranks=2, steps=30)
    assert main([str(tmp_path), "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    ranks = json.loads(line)["ranks"]
    assert [rank["step"] for rank in ranks] == [29, 29]
    assert ranks[0]["values"] == pytest.approx({"loss": 2.0 / 30, "accuracy": 0.875})
    assert ranks[1]["density"] == 0.001
    assert main([str(tmp_path), "--json"]) == 0  # returns, as the run is over
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_rank_that_writes_nothing_is_shown_as_silent(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=10)
    path = path_of(tmp_path, 1)
    path.write_text("".join(map(as_text, lines_of(1, 2, 10)[:-1])))
    written = os.stat(path).st_mtime
    run = read_run(tmp_path)
    for later, state in ((5, "running"), (60, "silent")):
        ended, other = status_of(run, tmp_path, lambda later=later: written + later)
        assert other.state == state
        assert ended.state == "called shutdown() at step 10"
    ended_line, silent_line = as_lines([ended, other], in_colour=True)[1:]
    assert ended_line.endswith("\x1b[2mended\x1b[0m")
    assert silent_line.endswith("\x1b[1;31msilent for 60 s\x1b[0m")


def test_rank_with_minute_long_merges_is_not_silent_between_them(
    tmp_path: Path,
) -> None:
    merges = {"covers": "mega-batch", "local_steps": 100, "samples": 3200, "compute_seconds": 60.0}
    path = path_of(tmp_path, 0)
    path.write_text("".join(map(as_text, lines_of(0, 1, 10, **merges)[:-1])))
    written = os.stat(path).st_mtime
    for later, state in ((100, "running"), (130, "silent")):
        (status,) = status_of(read_run(tmp_path), tmp_path, lambda later=later: written + later)
        assert status.state == state
    assert status.samples == 32
    assert status.sent_bytes == 12
    assert sum(status.step_seconds.values()) == pytest.approx(0.60004)


@pytest.mark.parametrize("lines", [1, 5])
def test_rank_that_writes_every_100th_step_is_not_silent_between_them(
    tmp_path: Path, lines: int
) -> None:
    """Steps take half a second; the first and each 100th are written."""
    file = LineFile(path_of(tmp_path, 0))
    file.take([begin(0, 1, every=100)])
    for number in range(lines):
        step = report(max(0, 100 * number - 1), compute_seconds=0.5, synchronize_seconds=0.0)
        file.take([step_line(step, 0.5 * (step.step + 1), 1200, 0)])
    file.close()
    written = os.stat(path_of(tmp_path, 0)).st_mtime
    for later, state in ((95, "running"), (105, "silent")):
        (status,) = status_of(read_run(tmp_path), tmp_path, lambda later=later: written + later)
        assert status.state == state


def test_means_exclude_first_step_of_an_attempt_if_others_follow(tmp_path: Path) -> None:
    """The first step measures links, which takes seconds."""
    path = path_of(tmp_path, 0)
    lines = lines_of(0, 1, 3)
    lines[1]["synchronize_seconds"] = 3.0
    for count, seconds in ((3, 3.006), (len(lines), 0.01)):
        path.write_text("".join(map(as_text, lines[:count])))
        (status,) = status_of(read_run(tmp_path), tmp_path)
        assert sum(status.step_seconds.values()) == pytest.approx(seconds)


def test_run_with_fewer_ranks_than_the_previous_shows_only_its_own(tmp_path: Path) -> None:
    for rank in range(4):  # all killed
        path_of(tmp_path, rank).write_text("".join(map(as_text, lines_of(rank, 4, 400)[:-1])))
    for rank in range(2):
        begin, *lines = lines_of(rank, 2, 400)
        begin |= {"began_unix_seconds": 1.8e9, "unix_seconds": 1.8e9, "host": "new"}
        with path_of(tmp_path, rank).open("a") as file:
            file.write("".join(map(as_text, [begin, *lines])))
    (statuses,) = itertools.islice(_snapshots(tmp_path, 0.001), 2)  # one: the run is over
    assert [(status.rank, status.host) for status in statuses] == [(0, "new"), (1, "new")]


@pytest.mark.parametrize("every", [1, 10])
def test_resumed_run_is_shown_running_at_its_current_speed(tmp_path: Path, every: int) -> None:
    """The run ended after 80 steps, and resumes from step 60 an hour later, half as fast."""
    reader = Reader(write_run(tmp_path, ranks=1, steps=80), RECENT)
    file = LineFile(path_of(tmp_path, 0))
    file.take([begin(0, 1, unix_seconds=1.7e9 + 3600)])
    file.take([{"what": "resumed", "seconds": 0.1, "step": 60}])
    run = reader.read()
    (status,) = status_of(run, tmp_path, lambda: path_of(tmp_path, 0).stat().st_mtime)
    assert (status.state, status.steps_per_second) == ("running", None)
    assert run.first.end is None  # otherwise `gtopk top` would exit
    for step in [0, *range(every - 1, 30, every)]:
        slow = report(60 + step, compute_seconds=0.016)
        file.take([step_line(slow, 0.02 * step, 1200 * (step + 1), 0)])
    file.close()
    (status,) = status_of(reader.read(), tmp_path)
    assert status.step == 89
    assert status.steps_per_second == pytest.approx(50)
    assert sum(status.step_seconds.values()) == pytest.approx(0.02)


def test_old_values_and_skipped_steps_are_still_shown(tmp_path: Path) -> None:
    lines = lines_of(0, 1, 800)
    lines[-1:] = []
    at = {"seconds": 0.01, "step": 1}
    lines.insert(2, {"what": "values", **at, "values": {"accuracy": 0.5, "warmth": 0.75}})
    lines[1]["skipped"] = True
    path_of(tmp_path, 0).write_text("".join(map(as_text, lines)))
    (status,) = next(_snapshots(tmp_path, 1.0))
    assert (status.step, status.skipped) == (799, 1)
    assert status.values == pytest.approx({"loss": 2.0 / 800, "accuracy": 0.875, "warmth": 0.75})


def test_nonfinite_values_are_shown_as_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverge(write_run(tmp_path, ranks=2, steps=10), "loss")
    assert main([str(tmp_path), "--once"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line[head.index("loss") :].split()[0] for line in lines] == ["nan", "nan"]
    assert main([str(tmp_path), "--json"]) == 0
    assert [rank["values"]["loss"] for rank in json.loads(capsys.readouterr().out)["ranks"]] == [
        None,
        None,
    ]


def test_narrow_terminal_gets_fewer_columns(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=2, steps=30))
    statuses = status_of(run, tmp_path)
    widest, _ = rows(statuses)
    for width in (150, 100, 80, 60):
        headings, cells = rows(statuses, width)
        longest = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        assert sum(longest) + 2 * (len(longest) - 1) <= width
        assert headings == [each for each in widest if each in headings]
        assert {"rank", "step", "step takes", "loss", "state"} <= set(headings)
    assert rows(statuses, 20)[0] == ["rank", "step", "state"]


def test_accuracy_and_loss_precede_other_logged_values(tmp_path: Path) -> None:
    file = LineFile(path_of(tmp_path, 0))
    values = {"batch": 7.0, "epoch": 2.0, "loss": 0.5, "lr": 0.1, "test accuracy": 0.9}
    file.take([begin(0, 1), {"what": "values", "seconds": 1.0, "step": 1, "values": values}])
    file.close()
    headings, _ = rows(status_of(read_run(tmp_path), tmp_path))
    assert headings == ["rank", "host", "test accuracy", "loss", "state"]


@pytest.mark.parametrize("every", ["0", "1e300", "nan"])
def test_interval_out_of_range_exits_with_the_reason(
    every: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["runs", "--every", every])
    assert "--every: must lie in (0, 86400]" in capsys.readouterr().err


def test_folder_without_a_record_exits_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == 1
    assert "must hold a run's record" in capsys.readouterr().err


def test_missing_records_are_reported_when_they_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished_record = "".join(map(as_text, lines_of(0, 3, 10)[:-1]))
    path_of(tmp_path, 0).write_text(unfinished_record)

    waits = itertools.count()

    def later(seconds: float) -> None:
        if next(waits) == 1:  # after two snapshots of rank 0 alone
            write_run(tmp_path, ranks=3, steps=10)

    monkeypatch.setattr("gtopk.cli.top.time.sleep", later)
    assert main([str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [len(json.loads(line)["ranks"]) for line in out.splitlines()] == [1, 1, 3]
    (line,) = err.splitlines()
    assert line.startswith("gtopk top: ranks 1, 2: no record found")


def test_top_waits_for_a_run_to_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, waits = tmp_path / "run", itertools.count()

    def later(seconds: float) -> None:
        if (wait := next(waits)) == 1:
            folder.mkdir()
            path_of(folder, 0).touch()
        elif wait == 2:
            write_run(folder, ranks=1, steps=10)

    monkeypatch.setattr("gtopk.cli.top.time.sleep", later)
    assert main([str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"gtopk top: waiting for a run to begin in '{folder}'\n"
    assert [rank["step"] for rank in json.loads(out)["ranks"]] == [9]
    assert next(waits) == 3


def fake_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stdout a terminal wide enough for every column."""
    for name, value in {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_table_is_redrawn_on_a_terminal_until_the_run_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_terminal(monkeypatch)
    monkeypatch.chdir(tmp_path)
    *first, end = lines_of(0, 1, 10)
    file = LineFile(path_of("run", 0))
    file.take(first)
    later = iter([[step_line(report(10), 0.11, 13_200, 352)], [end]])
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        file.take(next(later))

    monkeypatch.setattr("gtopk.cli.top.time.sleep", pause)
    assert main(["run", "--every", "0.5"]) == 0
    file.close()
    assert pauses == [0.5, 0.5]
    drawn = capsys.readouterr().out
    words = [line.split() for line in without_controls(drawn).splitlines()]
    rows_of_rank_0 = [row for row in words if row[:2] == ["0", "host0"]]
    assert [(row[2], row[-1]) for row in rows_of_rank_0] == [
        ("9", "running"),
        ("10", "running"),
        ("10", "ended"),
    ]
    assert words[0] == ["run"]
    assert drawn.count(THREE_UP) == 2  # title, headings and a row, drawn over the previous ones
    assert drawn.rindex(CURSOR_SHOWN) > drawn.rindex(CURSOR_HIDDEN) > -1


def test_ranks_beyond_the_screen_height_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_terminal(monkeypatch)
    monkeypatch.setenv("LINES", "8")
    write_run(tmp_path, ranks=20, steps=10)
    assert main([str(tmp_path)]) == 0
    # A title and headings; the cursor's line is the eighth.
    *drawn, last = without_controls(capsys.readouterr().out).splitlines()
    assert [line.split()[0] for line in drawn[2:]] == ["0", "1", "2", "3"]
    assert last == "and 16 more: enlarge the window"


def test_brackets_in_names_are_not_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_terminal(monkeypatch)
    monkeypatch.chdir(tmp_path)
    first, *lines = lines_of(0, 1, 10)
    at = {"seconds": 0.1, "step": 10}
    lines.insert(-1, {"what": "values", **at, "values": {"loss": 0.5, "loss[val]": 0.25}})
    lines = [line for line in lines if "accuracy" not in line.get("values", ())]
    file = LineFile(path_of("[/run]", 0))
    file.take([{**first, "host": "[a]"}, *lines])
    file.close()
    assert main(["[/run]"]) == 0
    title, headings, row, *_ = without_controls(capsys.readouterr().out).splitlines()
    assert title.split() == ["[/run]"]
    assert {"loss", "loss[val]"} <= set(headings.split())
    assert row.split()[1] == "[a]"


def test_ctrl_c_restores_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_terminal(monkeypatch)
    path_of(tmp_path, 0).write_text("".join(map(as_text, lines_of(0, 1, 10)[:-1])))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gtopk.cli.top.time.sleep", interrupt)
    assert main([str(tmp_path)]) == 0
    drawn, err = capsys.readouterr()
    assert drawn.rindex(CURSOR_SHOWN) > drawn.rindex(CURSOR_HIDDEN) > -1
    assert err == "gtopk top: stopped by Ctrl-C; the run continues\n"


def test_step_time_over_an_emulated_link_is_labelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = "emulated link of 100 Mbit/s, 0.4 ms"
    for rank in range(2):
        first, *lines = lines_of(rank, 2, 30)
        first["link"] = link if rank == 0 else ""
        path_of(tmp_path, rank).write_text("".join(map(as_text, [first, *lines])))
    assert main([str(tmp_path), "--once"]) == 0
    assert "emulated step takes" in capsys.readouterr().out.splitlines()[0]
    assert main([str(tmp_path), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["link"] == link
