"""The page of a run is self-contained, agrees with its record, and is safe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gtopk.cli.charts import Point, lines_plot
from gtopk.cli.report import as_record, main, page, series
from gtopk.cli.report.series import BINS, axes, binned, events, logged, parts_over_time, verdict
from gtopk.cli.top import status_of
from gtopk.telemetry.lines import as_text, path_of, step_line
from gtopk.telemetry.reading import Run, read_run
from gtopk.telemetry.recorder import Recorder
from gtopk.telemetry.run_record import LineFile
from gtopk.telemetry.step_report import Balance, parts
from gtopk.units import bytes_text
from tests.gtopk.made_runs import begin, diverge, lines_of, report, write_run

FIGURES = (
    *("Accuracy", "Loss", "A step of each rank", "Steps, one after the other"),
    "Straggler score",
    *("The exchange, predicted and measured", "Batch sizes", "Density", "Bits per entry"),
    *("Norm of the residual", "Age of the residual"),
)


def over_bytes(run: Run) -> list[Point]:
    """Return the loss over the bytes that a rank has sent."""
    return logged(run, "loss", axes(run)["bytes"])


def html_of(folder: Path) -> str:
    return page(read_run(folder), "a run").replace("\N{NO-BREAK SPACE}", " ")


def test_page_loads_nothing_from_outside_and_runs_no_scripts(tmp_path: Path) -> None:
    html = html_of(write_run(tmp_path))
    assert not re.search(r"https?://|@import|url\((?!#)|<script|<link rel=\"stylesheet", html)
    assert "default-src 'none'" in html
    assert set(re.findall(r'href="([^"]*)"', html)) == {"data:,"}


def test_page_has_every_figure_and_unique_ids(tmp_path: Path) -> None:
    html = html_of(write_run(tmp_path))
    assert set(re.findall(r"<figure><h3>(.*?)</h3>", html)) == set(FIGURES)
    for over in ("steps", "time", "bytes"):
        assert html.count(f">over {over}</label>") == 2
    ids = re.findall(r' id="([^"]+)"', html.split("</style>")[1])
    others = [each for each in ids if not each.endswith("-hatch")]  # hatches may repeat
    assert len(others) == len(set(others))


def test_verdict_is_at_the_top_if_dense_was_predicted(tmp_path: Path) -> None:
    assert "compare with a dense run" not in html_of(write_run(tmp_path / "one"))
    html = html_of(write_run(tmp_path / "two", dense_seconds=1.0))
    verdict = html.index("<strong>Compression saved up to ")
    assert html.index("<h1>") < verdict < html.index('<dl class="tiles">')


def test_head_shows_the_figures_of_the_record(tmp_path: Path) -> None:
    html = html_of(write_run(tmp_path, ranks=3, steps=50))
    values = re.findall(r'<dd class="value">(.*?)</dd>', html)
    dense_bytes = 2 * 2 / 3 * 4 * 100_000
    assert values == ["87.5 %", f"1/{dense_bytes / 1200:.0f}", "10 ms", "3"]
    assert "3 ranks on 2 hosts, over mpi, took 50 steps" in html
    assert "60.0 % of it compute" in html
    assert "ratio of measured to predicted time is 1.20." in html


@pytest.mark.parametrize(("exchanging", "of"), [(0, 4), (4, 4), (2, 2)])
def test_dense_bytes_are_for_the_ranks_that_exchange_together(
    tmp_path: Path, exchanging: int, of: int
) -> None:
    """Such as replicas of a shard; 0: an earlier version did not record the number."""
    for rank in range(4):
        lines = lines_of(rank, 4, 50)
        for line in lines:
            line |= {"ranks": exchanging} if line["what"] == "step" else {}
        path_of(tmp_path, rank).write_text("".join(map(as_text, lines)))
    figures = as_record(read_run(tmp_path))
    dense_bytes = 2 * (of - 1) / of * 4 * 100_000
    value, _ = figures["figures"]["Bytes sent, of dense"]
    assert value == f"1/{dense_bytes / 1200:.0f}"


def test_dense_bytes_cover_the_whole_model_if_fragments_take_turns(tmp_path: Path) -> None:
    turns = {"covers": "outer step", "elements": 25_000, "model_elements": 100_000}
    run = read_run(write_run(tmp_path, **turns))
    (sent,) = [tile for tile in series.tiles(run) if tile.name == "Bytes sent, of dense"]
    least = bytes_text(2 * 2 / 3 * 4 * 100_000)
    assert sent.detail.endswith(f"a dense allreduce of float32 sends at least {least}")
    assert series.what_was_run(run)["Values of the model"] == "100,000"


def test_markup_in_a_record_is_escaped(tmp_path: Path) -> None:
    html = html_of(write_run(tmp_path))
    assert "<b>advice" not in html
    assert "&lt;b&gt;advice" in html


def test_dense_run_has_no_residual_figures(tmp_path: Path) -> None:
    write_run(tmp_path, selected=100_000, updated=100_000, coded_entries=0, predicted_seconds=None)
    for path in tmp_path.iterdir():
        kept = [line for line in path.read_text().splitlines() if '"withheld"' not in line]
        path.write_text("\n".join(kept))
    titles = set(re.findall(r"<figure><h3>(.*?)</h3>", html_of(tmp_path)))
    assert titles == set(FIGURES[:5]) | {"Batch sizes"}


@pytest.mark.parametrize("covers", ["mega-batch", "period"])
def test_ranks_that_step_at_their_own_pace_are_shown_over_time(tmp_path: Path, covers: str) -> None:
    run = read_run(write_run(tmp_path, covers=covers, local_steps=3, predicted_seconds=None))
    html = page(run, "a run")
    assert ">over time</label>" in html
    assert ">over steps</label>" not in html
    assert ">step</text>" not in html
    found = parts_over_time(run)
    assert [sum(shares.values()) for _, shares in found] == pytest.approx([1.0] * len(found))
    assert all(shares["compute"] == pytest.approx(0.6) for _, shares in found)
    assert run.ranks[0].steps[0].seconds < found[0][0] < found[-1][0] < run.seconds


def test_page_with_one_axis_has_no_axis_buttons(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, covers="period", sent_bytes=0))
    for rank in run.ranks:
        rank.steps = [step._replace(bytes_so_far=0) for step in rank.steps]
    html = page(run, "a run")
    assert "<label" not in html
    assert "Bytes are those" not in html
    assert "Accuracy</h3>" in html


def test_parts_without_time_are_not_in_the_legend(tmp_path: Path) -> None:
    zero_seconds = {"select_seconds": 0.0, "apply_seconds": 0.0, "communicate_seconds": 0.0}
    html = html_of(write_run(tmp_path, **zero_seconds, merge_seconds=0.0, code_seconds=0.0))
    keys = set(re.findall(r'class="part (\w+)" width="34"', html))
    assert keys == {"compute", "wait"}
    assert "pack is encode" not in html


def test_values_are_plotted_over_mean_bytes_sent_per_rank(tmp_path: Path) -> None:
    for rank, sent in enumerate((500, 1500)):
        file = LineFile(path_of(tmp_path, rank))
        file.take([begin(rank, 2, seconds=100.0)])
        file.take([step_line(report(0, sent_bytes=sent), 1.0, sent, 32)])
        file.take([{"what": "values", "seconds": 2.0, "step": 1, "values": {"loss": 3.0}}])
        file.close()
    assert over_bytes(read_run(tmp_path)) == [Point(1000.0, 3.0, 3.0, 3.0)]


def test_rank_that_joins_later_does_not_reduce_mean_bytes_sent(tmp_path: Path) -> None:
    """One rank, two from second 100 on; each sends 1,000 bytes a second."""
    for rank, met, seconds in ((0, 0, range(1, 100)), (0, 100, range(1, 4)), (1, 100, range(1, 4))):
        file = LineFile(path_of(tmp_path, rank))
        file.take([begin(rank, 1 + met // 100, unix_seconds=1.7e9 + met, seconds=1.0 * met)])
        if met:
            file.take([{"what": "resumed", "seconds": 0.0, "step": 99}])
        for second in seconds:
            step = report(met + second - 1 - met // 100, sent_bytes=1000)
            file.take([step_line(step, 1.0 * second, 1000 * second, 32)])
        if rank == 0:
            at = {"seconds": max(seconds) + 0.5, "step": 99}
            file.take([{"what": "values", **at, "values": {"loss": 1.0}}])
        file.close()
    found = over_bytes(read_run(tmp_path))
    assert [point.x for point in found] == [99_000.0, 102_000.0]


def test_clock_set_back_between_attempts_does_not_break_the_report(tmp_path: Path) -> None:
    file = LineFile(path_of(tmp_path, 0))
    for step, unix in ((0, 1.7e9), (1, 1.7e9 - 60)):
        file.take([begin(0, 1, unix_seconds=unix, step=step)])
        file.take([{"what": "resumed", "seconds": 0.0, "step": step}] if step else [])
        file.take([step_line(report(step, sent_bytes=1000), 1.0, 1000, 32)])
        file.take([{"what": "values", "seconds": 1.5, "step": step, "values": {"loss": 1.0}}])
    file.close()
    found = over_bytes(read_run(tmp_path))
    assert [point.x for point in found] == [1000.0, 2000.0]


def test_steps_before_the_record_are_not_counted(tmp_path: Path) -> None:
    file = LineFile(path_of(tmp_path, 0))
    file.take([begin(0, 1), {"what": "resumed", "seconds": 0.1, "step": 5000}])
    file.take([step_line(report(step), 0.2, 1200, 32) for step in range(5000, 5010)])
    file.take([begin(0, 1, unix_seconds=1.7e9 + 9)])
    file.take([{"what": "resumed", "seconds": 0.1, "step": 5008}])
    file.take([step_line(report(step), 1.0, 1200, 32) for step in range(5008, 5020)])
    file.close()
    run = read_run(tmp_path)
    assert "1 rank on one host, over mpi, took 20 steps in 10 s" in html_of(tmp_path)
    assert as_record(run)["figures"]["Ranks"][1].startswith("20 steps in ")
    assert [rank["steps"] for rank in as_record(run)["ranks"]] == [20]


def test_means_exclude_the_first_steps_of_each_attempt(tmp_path: Path) -> None:
    file = LineFile(path_of(tmp_path, 0))
    for attempt in range(3):
        file.take([begin(0, 1, unix_seconds=1.7e9 + 60 * attempt)])
        file.take([{"what": "resumed", "seconds": 0.1, "step": 10 * attempt}] * bool(attempt))
        for number in range(10):
            seconds = {"synchronize_seconds": 3.0} if number < 2 else {}
            step = report(10 * attempt + number, **seconds)
            file.take([step_line(step, 1.0 + number, 1200, 32)])
    file.close()
    run = read_run(tmp_path)
    assert len(run.first.steps) == 30
    assert series.mean_parts(series.settled(run.first)) == pytest.approx(parts(report()))
    (rank,) = as_record(run)["ranks"]
    assert rank["utilisation"] == pytest.approx(0.6)
    assert as_record(run)["figures"]["A step takes"][0].startswith("10")


def test_killed_rank_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=30)
    path_of(tmp_path, 1).write_text("".join(map(as_text, lines_of(1, 2, 30)[:40]))[:-30])
    html = html_of(tmp_path)
    assert "ended abnormally" in html
    assert re.search(r"<h3>rank 1</h3><p>has written nothing after step \d+", html)


def test_unfinished_run_is_not_reported_as_failed(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=30)
    for path in tmp_path.iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    html = html_of(tmp_path)
    assert "did not end" not in html
    assert "so far" in html
    assert "has written nothing" not in html


def test_many_ranks_or_a_single_step_make_a_page(tmp_path: Path) -> None:
    html = html_of(write_run(tmp_path / "many", ranks=20, steps=3))
    assert html.count(">rank 19</text>") == 1
    assert html_of(write_run(tmp_path / "one", ranks=1, steps=1)).count("<figure>") >= 5


def ticks_of(title: str, html: str) -> list[str]:
    """Return the tick labels of a figure's first drawing: the y axis upwards, then the x axis."""
    figure = html.split(f"<figure><h3>{title}</h3>")[1].split("</svg>")[0]
    return re.findall(r'<text class="tick[^>]*>([^<]*)<', figure)


def write_losses(folder: Path, name: str, values: list[float]) -> Path:
    """Write a record with a step each second, and a value of this name after each step."""
    file = LineFile(path_of(folder, 0))
    file.take([begin(0, 1)])
    for step, value in enumerate(values):
        file.take([step_line(report(step), 1.0 + step, 1200 * (step + 1), 32)])
        at = {"seconds": 1.0 + step, "step": step + 1}
        file.take([{"what": "values", **at, "values": {name: value}}])
    file.close()
    return folder


@pytest.mark.parametrize(
    ("name", "values", "ticks"),
    [
        ("accuracy", [0.961, 0.97, 0.978], ["96 %", "96.5 %", "97 %", "97.5 %"]),
        ("accuracy", [0.9712, 0.9719], ["97.12 %", "97.14 %", "97.16 %", "97.18 %"]),
        ("loss", [2.30261, 2.30264], ["2.30261", "2.30262", "2.30263", "2.30264"]),
        ("loss", [5e5, 5e5 + 3], ["500000", "500001", "500002", "500003"]),
        ("loss", [0.0001], ["0", "2e-05", "4e-05", "6e-05", "8e-05", "0.0001"]),
        ("accuracy", [0.5, 0.5], ["0", "10 %", "20 %", "30 %", "40 %", "50 %"]),
    ],
)
def test_axis_ticks_are_distinct_and_constant_values_start_at_zero(
    tmp_path: Path, name: str, values: list[float], ticks: list[str]
) -> None:
    found = ticks_of(name.capitalize(), html_of(write_losses(tmp_path, name, values)))
    assert found[: len(ticks)] == ticks


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (0, 12_000, ["0", "5000", "10k"]),
        (0, 2_000_000, ["0", "500k", "1000k", "1500k", "2000k"]),
        (0, 30_000_000, ["0", "10M", "20M", "30M"]),
        (20_000_000, 20_000_600, ["20M", "20.0002M", "20.0004M", "20.0006M"]),
    ],
)
def test_step_ticks_are_short_numbers(first: int, last: int, ticks: list[str]) -> None:
    drawn = lines_plot("", {"": [Point(x, 1.0, 1.0, 1.0) for x in (first, last)]}, "")
    words = re.findall(r'<text class="tick[^>]*>([^<]*)<', drawn)
    assert set(ticks) <= set(words)
    assert not any("e+" in each for each in words)


def test_axes_of_a_single_step_hold_only_that_step(
    tmp_path: Path,
) -> None:
    html = html_of(write_losses(tmp_path, "loss", [1.0]))
    assert "took 1 step in 1 s" in html
    drawn = dict(re.findall(r'aria-label="loss over ([^"]*)">(.*?)</svg>', html))
    ticks = {over: re.findall(r'"tick middle"[^>]*>([^<]*)<', drawn[over]) for over in drawn}
    assert ticks["step"] == ["1"]
    assert ticks["time"] == ["600 ms", "800 ms", "1 s", "1.20 s", "1.40 s"]


@pytest.mark.parametrize("seconds", [0.0, -0.004])
def test_steps_without_time_make_a_page(tmp_path: Path, seconds: float) -> None:
    """Like the first step of a hook, which has no time before it; times are never negative."""
    write_run(tmp_path, compute_seconds=seconds, synchronize_seconds=-seconds / 2)
    assert all(part >= 0 for part in parts(read_run(tmp_path).first.steps[0].report).values())
    assert "A step of each rank" in html_of(tmp_path)


def test_last_value_is_the_one_logged_last(tmp_path: Path) -> None:
    file = LineFile(path_of(tmp_path, 0))
    file.take([begin(0, 1), step_line(report(0), 0.1, 1200, 32)])
    for seconds, loss in ((0.2, 3.0), (0.3, 1.5)):  # after training, after evaluation
        note = {"what": "values", "seconds": seconds, "step": 1, "values": {"loss": loss}}
        file.take([note])
    file.close()
    assert as_record(read_run(tmp_path))["figures"]["Loss"][0] == "1.5"


def test_rank_without_steps_is_reported_as_silent_after_it_began(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=3)
    path_of(tmp_path, 1).write_text(as_text(begin(1, 2)))
    (event,) = [event for where, event in events(read_run(tmp_path)) if where == "rank 1"]
    assert event.startswith("has written nothing after it began, ")


def test_long_series_is_binned_without_losing_its_range() -> None:
    values = [(step, float(step % 97)) for step in range(10_000)]
    points = binned(values)
    assert len(points) == BINS
    assert min(point.low for point in points) == 0
    assert max(point.high for point in points) == 96
    assert sum(point.mean for point in points) / BINS == pytest.approx(48, abs=0.1)
    assert binned([(1, None), (2, float("nan"))]) == []


def test_totals_include_steps_that_were_not_written(tmp_path: Path) -> None:
    recorder = Recorder([LineFile(path_of(tmp_path, 0))], begin(0, 1), 0.0, 100, lambda: 0)
    for step in range(199):
        recorder.note_step(report(step))
    recorder.end("called shutdown()")
    recorder.close()
    run = read_run(tmp_path)
    assert [step.report.step for step in run.first.steps] == [0, 99, 198]
    (rank,) = as_record(run)["ranks"]
    assert (rank["steps"], rank["samples"], rank["sent_bytes"]) == (199, 199 * 32, 199 * 1200)
    assert "199 steps" in html_of(tmp_path)


@pytest.mark.parametrize(
    ("steps", "covered"), [(1, 1), (140, 1), (1000, 1), (1060, 1), (1120, 8), (1121, 8)]
)
def test_verdict_includes_steps_that_were_not_written(
    tmp_path: Path, steps: int, covered: int
) -> None:
    """The first step, which plans and calibrates, and the last are written and count once."""
    every = 100 // covered
    line = begin(0, 1, every=every)
    recorder = Recorder([LineFile(path_of(tmp_path, 0))], line, 0.0, every, lambda: 0)
    balance = Balance()
    for last in range(covered - 1, steps, covered):
        took = 0.9 if last < covered else 0.003
        done = report(
            last,
            exchange_seconds=took,
            dense_seconds=0.0123,
            predicted_seconds=None,
            skipped=last % 37 == 5,
            local_steps=covered,
        )
        balance.note(done)
        recorder.note_step(done)
    recorder.end("called shutdown()")
    recorder.close()
    assert verdict(read_run(tmp_path)) == balance.verdict() != ""


def test_message_common_to_all_ranks_is_shown_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    for rank in range(3):
        text = f"rank {rank}: a gradient is not finite on rank 1"
        note = {"what": "message", "seconds": 1.0, "step": 9, "level": "WARNING", "text": text}
        with path_of(tmp_path, rank).open("a") as file:
            file.write(as_text(note))
    found = [each for each in events(read_run(tmp_path)) if "finite" in each[1]]
    assert found == [("step 9, rank 0", "a gradient is not finite on rank 1")]


def test_command_writes_the_page_and_prints_its_path(tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "report.html"
    assert main([str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [rank["utilisation"] for rank in record["ranks"]] == pytest.approx([0.6] * 3)
    assert [rank["straggler_score"] for rank in record["ranks"]] == pytest.approx([1, 1 / 2, 1 / 3])
    assert record["figures"]["A step takes"][0].startswith("10")
    elsewhere = tmp_path / "pages" / "first.html"  # its folder is created
    assert main([str(tmp_path), "--out", str(elsewhere)]) == 0
    assert elsewhere.read_text() == (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("after", [0, 20])
def test_diverging_run_has_a_page_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    write_run(tmp_path, ranks=2, steps=50)
    diverge(tmp_path, "accuracy")  # the first on the page
    diverge(tmp_path, "loss", after)
    assert main([str(tmp_path)]) == 0
    html = html_of(tmp_path)
    assert '<div class="tile loss"><dt>Accuracy</dt><dd class="value">not finite</dd>' in html
    assert ("Loss</h3>" in html) == (after > 0)
    capsys.readouterr()
    assert main([str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["figures"]["Accuracy"][0] == "not finite"
    assert len(record["logged"]["loss"]) == after


def test_skipped_steps_that_share_a_number_are_each_counted(
    tmp_path: Path,
) -> None:
    """As with a GradScaler, which then takes no step; the second rank was killed early."""
    numbers = [(0, True)] * 4 + [(0, False), (1, False), (2, True), (2, False)]
    for rank, count in ((0, 8), (1, 2)):
        file = LineFile(path_of(tmp_path, rank))
        file.take([begin(rank, 2)])
        for step, skipped in numbers[:count]:
            file.take([step_line(report(step, skipped=skipped), 0.1, 1200, 32)])
        file.close()
    run = read_run(tmp_path)
    assert ("5 steps", "skipped on every rank, at step 0 (4 times), step 2") in events(run)
    (first, _) = status_of(run, tmp_path)
    assert first.skipped == 5


@pytest.mark.parametrize("started", [False, True])
def test_record_without_steps_exits_with_an_error(tmp_path: Path, capsys, started: bool) -> None:
    if started:
        file = LineFile(path_of(tmp_path, 0))
        file.take([begin()])
        file.close()
    assert main([str(tmp_path)]) == 1
    text = "has no steps yet" if started else "must hold a run's record"
    assert text in capsys.readouterr().err


def test_missing_record_is_reported_on_page_and_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, ranks=3)
    path_of(tmp_path, 1).unlink()
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err.startswith("gtopk report: rank 1: no record found")
    assert "<h3>rank 1</h3><p>no record found" in html_of(tmp_path)
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["happened"][0][0] == "rank 1"


def test_times_over_an_emulated_link_are_labelled(tmp_path: Path) -> None:
    first, *lines = lines_of(0, 1, 30, dense_seconds=1.0)
    first["link"] = "emulated link of 100 Mbit/s"
    path_of(tmp_path, 0).write_text("".join(map(as_text, [first, *lines])))
    html = html_of(tmp_path)
    assert "and an emulated link of 100 Mbit/s, took" in html
    assert "Seconds are emulated" in html
    assert "<strong>Over an emulated link of 100 Mbit/s, compression saved" in html
    assert "; over an emulated link of 100 Mbit/s</dd>" in html.replace("\N{NO-BREAK SPACE}", " ")
