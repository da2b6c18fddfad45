"""Incomplete records are read as far as they go."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gtopk.telemetry.lines import as_text, path_of, step_line
from gtopk.telemetry.reading import Reader, read_run
from gtopk.telemetry.run_record import LineFile
from tests.gtopk.made_runs import begin, lines_of, report, write_run


def test_written_records_are_read_back(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=3, steps=50))
    assert [rank.rank for rank in run.ranks] == [0, 1, 2]
    for rank in run.ranks:
        assert [step.report for step in rank.steps] == [report(step) for step in range(50)]
        assert rank.steps[-1].bytes_so_far == 50 * 1200
        assert [note.content["norm"] for note in rank.residuals] == [1.0 + rank.rank] * 3
        assert rank.end == "called shutdown() at step 50"


def test_steps_of_all_ranks_are_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=3, steps=5))
    firsts = [rank.steps[0].seconds for rank in run.ranks]
    assert firsts == pytest.approx([0.01, 1.01, 2.01])  # their calendars are 10 s apart


def test_incomplete_last_line_of_killed_rank_is_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=20)
    path = path_of(tmp_path, 1)
    text = "".join(map(as_text, lines_of(1, 2, 20)[:-1]))
    for cut in range(1, 400, 57):
        path.write_text(text[:-cut])
        rank = read_run(tmp_path).ranks[1]
        assert rank.end is None
        assert 17 <= len(rank.steps) <= 20
        assert [s.report for s in rank.steps] == [report(step) for step in range(len(rank.steps))]


def test_reader_of_recent_steps_keeps_totals_and_skipped_steps(tmp_path: Path) -> None:
    lines = lines_of(0, 1, 400)
    for line in lines:
        line |= {"skipped": line["step"] in (3, 120)} if line["what"] == "step" else {}
    path_of(tmp_path, 0).write_text("".join(map(as_text, lines)))
    (rank,) = Reader(tmp_path, recent_steps=10).read().ranks
    assert [step.report.step for step in rank.steps] == [3, 120, *range(390, 400)]
    assert rank.steps[-1].bytes_so_far == 400 * 1200
    assert [note.content for note in rank.values] == [
        {"loss": pytest.approx(2.0 / 400), "accuracy": 0.875}
    ]
    assert rank.end == "called shutdown() at step 400"


@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 20])
def test_reading_again_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("gtopk.telemetry.reading._BLOCK_BYTES", block_bytes)
    content = "".join(map(as_text, lines_of(0, 1, 60))).encode()
    path = path_of(tmp_path, 0)
    all_steps, recent = Reader(tmp_path), Reader(tmp_path, recent_steps=10)
    ends = [len(content) * n // 7 for n in range(1, 8)]  # mostly within a line
    for begun, ended in itertools.pairwise([0, *ends]):
        with path.open("ab") as file:
            file.write(content[begun:ended])
        expected = read_run(tmp_path)
        assert all_steps.read() == expected
        (rank,) = recent.read().ranks
        assert rank.steps == expected.first.steps[-10:]
        assert rank.end == expected.first.end
    with path.open("r+b") as file:
        file.write(b" " * (len(content) - 1))  # must not be read again
    assert all_steps.read() == expected


def test_replaced_record_is_read_from_its_beginning(tmp_path: Path) -> None:
    reader = Reader(write_run(tmp_path, ranks=1, steps=50))
    assert len(reader.read().first.steps) == 50
    path_of(tmp_path, 0).write_text("".join(map(as_text, lines_of(0, 1, 3))))
    assert len(reader.read().first.steps) == 3


def test_second_run_in_a_folder_replaces_the_first(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=3, steps=50)
    for rank in range(2):
        file = LineFile(path_of(tmp_path, rank))
        file.take([begin(rank, 2, unix_seconds=1.8e9), step_line(report(0), 0.5, 1200, 32)])
        file.close()
    run = read_run(tmp_path)
    assert [len(rank.steps) for rank in run.ranks] == [1, 1]


def test_resumed_run_of_earlier_version_is_read_as_one_run(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=50)
    file = LineFile(path_of(tmp_path, 0))
    again = begin(0, 1, step=50, unix_seconds=1.7e9 + 60, seconds=3.0)  # on another host
    del again["again"]
    file.take([again, step_line(report(50), 0.5, 1200, 32)])
    file.close()
    (rank,) = read_run(tmp_path).ranks
    assert [step.report.step for step in rank.steps] == list(range(51))
    assert rank.steps[-1].seconds == pytest.approx(60.5)
    assert rank.steps[-1].bytes_so_far == 51 * 1200
    assert rank.steps[-1].samples_so_far == 51 * 32
    assert rank.end is None  # it continues


@pytest.mark.parametrize("recent_steps", [None, 10])
def test_run_resumed_after_its_begin_line_is_one_run(
    tmp_path: Path, recent_steps: int | None
) -> None:
    """A rank learns only after its begin that it resumes a run; some end before."""
    write_run(tmp_path, ranks=1, steps=70)  # another run, before it
    file = LineFile(path_of(tmp_path, 0))
    reader = Reader(tmp_path, recent_steps)
    message = {"what": "message", "seconds": 0.1, "step": 0, "level": "WARNING", "text": "said"}
    resumed = {"what": "resumed", "seconds": 0.2, "step": 50}
    kept = recent_steps or 50
    for resume in (False, True):
        file.take([begin(0, 1, unix_seconds=1.7e9 + 3600 * (1 + resume)), message])
        assert reader.read().first.steps == []  # counts as a new one so far
        if not resume:
            file.take([step_line(report(step), 0.5, 1200, 32) for step in range(50)])
            assert len(reader.read().first.steps) == kept
            file.take([begin(0, 1, unix_seconds=1.7e9 + 5400), message])  # and killed
    file.take([resumed])
    assert len(reader.read().first.steps) == kept
    file.take([step_line(report(step), 0.5, 1200, 32) for step in range(50, 60)])
    file.close()
    for run in (reader.read(), Reader(tmp_path, recent_steps).read()):
        steps = [step.report.step for step in run.first.steps]
        assert steps == list(range(50 - kept, 60))
        assert len(run.first.messages) == 3


@pytest.mark.parametrize("in_order", [False, True])
def test_failure_before_a_resume_is_kept_as_a_message(tmp_path: Path, in_order: bool) -> None:
    how = "failed at step 2: PeerError: rank 2 is lost"
    file = LineFile(path_of(tmp_path, 0))
    end = {"what": "end", "seconds": 2.0, "step": 2, "how": how, "in_order": in_order}
    steps = [step_line(report(step), 0.5, 1200, 32) for step in range(2)]
    file.take([begin(0, 1), *steps, end, begin(0, 1, unix_seconds=1.7e9 + 60)])
    file.take([{"what": "resumed", "seconds": 0.1, "step": 2}, step_line(report(2), 0.5, 1, 1)])
    file.close()
    (rank,) = read_run(tmp_path).ranks
    assert rank.end is None
    assert [note.content["text"] for note in rank.messages] == [how] * (not in_order)
    assert [note.step for note in rank.messages] == [1] * (not in_order)


@pytest.mark.parametrize("recent_steps", [None, 1000])
def test_repeated_steps_count_once_but_their_bytes_count_twice(
    tmp_path: Path, recent_steps: int | None
) -> None:
    """A run was killed after 50 steps, and resumed from its checkpoint of step 30."""
    write_run(tmp_path, ranks=1, steps=50)
    file = LineFile(path_of(tmp_path, 0))
    reader = Reader(tmp_path, recent_steps)
    file.take([begin(0, 1, unix_seconds=1.7e9 + 60)])
    file.take([{"what": "resumed", "seconds": 0.1, "step": 30}])
    assert [step.report.step for step in reader.read().first.steps] == list(range(50))
    values = {"what": "values", "seconds": 0.2, "step": 30, "values": {"loss": 0.5}}
    again = [step_line(report(s), 0.3, 1200 * (s - 29), 32 * (s - 29)) for s in range(30, 40)]
    file.take([values, *again, {**values, "seconds": 0.4, "step": 40}])
    file.close()
    (rank,) = reader.read().ranks
    assert [step.report.step for step in rank.steps] == list(range(40))
    assert [step.seconds > 60 for step in rank.steps] == [False] * 30 + [True] * 10
    assert rank.steps[-1].bytes_so_far == 60 * 1200
    assert rank.steps[-1].samples_so_far == 60 * 32
    if recent_steps is None:
        assert [note.step for note in rank.values] == [*range(1, 31), 30, 40]
        assert [note.step for note in rank.residuals] == [1, 21]
        assert [note.step for note in rank.scores] == [1, 21]
    assert len(rank.messages) == 1  # logged once, at step 50


def test_ranks_that_leave_and_return_keep_their_times(tmp_path: Path) -> None:
    """Two ranks, then one, then two, on a host with a later start of its clock."""
    files = [LineFile(path_of(tmp_path, rank)) for rank in range(2)]
    for met, ranks, seconds in ((0, 2, 864_000.0), (3000, 1, 3600.0), (6000, 2, 6600.0)):
        for rank, file in enumerate(files[:ranks]):
            step = met // 100
            file.take([begin(rank, ranks, unix_seconds=1.7e9 + met, seconds=seconds + rank)])
            if met:
                file.take([{"what": "resumed", "seconds": 0.1, "step": step}])
            file.take([step_line(report(step + s), 1.0 + s, 1200, 32) for s in range(30)])
    for file in files:
        file.close()
    run = read_run(tmp_path)
    assert run.began_unix_seconds == 1.7e9
    seconds_of_rank_0, seconds_of_rank_1 = (
        [step.seconds for step in rank.steps] for rank in run.ranks
    )
    assert seconds_of_rank_0 == [met + 1.0 + s for met in (0, 3000, 6000) for s in range(30)]
    assert seconds_of_rank_1 == [met + 2.0 + s for met in (0, 6000) for s in range(30)]


def test_rank_absent_from_a_run_adds_no_steps_of_earlier_runs(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=50)
    files = [LineFile(path_of(tmp_path, rank)) for rank in range(2)]
    files[0].take([begin(0, 1, unix_seconds=1.7e9 + 60), step_line(report(0), 0.5, 1200, 32)])
    for rank, file in enumerate(files):
        file.take([begin(rank, 2, unix_seconds=1.7e9 + 120)])
        file.take([{"what": "resumed", "seconds": 0.1, "step": 1}])
        file.take([step_line(report(1), 0.5, 1200, 32)])
        file.close()
    run = read_run(tmp_path)
    assert [[step.report.step for step in rank.steps] for rank in run.ranks] == [[0, 1], [1]]


def test_first_rank_to_begin_starts_the_new_run(tmp_path: Path) -> None:
    """Ranks write at different times: rank 1's begin may come before rank 0's."""
    write_run(tmp_path, ranks=2, steps=50)
    file = LineFile(path_of(tmp_path, 1))
    file.take([begin(1, 2, unix_seconds=1.7e9 + 60)])
    file.close()
    (rank,) = read_run(tmp_path).ranks
    assert (rank.rank, rank.steps, rank.end) == (1, [], None)


def test_attempts_of_earlier_version_are_paired_from_the_last(tmp_path: Path) -> None:
    for rank in range(2):
        file = LineFile(path_of(tmp_path, rank))
        for step, unix_seconds in ((0, 1.7e9), (1, 1.7e9 + 60)):
            old = begin(rank, 2, step=step, unix_seconds=unix_seconds + 10 * rank)
            del old["began_unix_seconds"], old["again"]
            file.take([old, step_line(report(step), 0.5, 1200, 32)])
        file.close()
    run = read_run(tmp_path)
    seconds = [[step.seconds for step in rank.steps] for rank in run.ranks]
    assert seconds == [[0.5, 60.5], [1.5, 61.5]]


def test_folder_without_record_raises_with_how_to_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`gtopk run --record FOLDER`, or with GTOPK_RUN=FOLDER"):
        read_run(tmp_path)


def test_record_of_another_format_raises(tmp_path: Path) -> None:
    path_of(tmp_path, 0).write_text(as_text(begin(format=99)))
    with pytest.raises(ValueError, match="of format 99, written by gtopk 0"):
        read_run(tmp_path)


def test_error_distinguishes_incomplete_files_from_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"files named rank-\*\.jsonl, and has none"):
        read_run(tmp_path)
    path_of(tmp_path, 0).touch()
    path_of(tmp_path, 1).write_bytes(as_text(begin(1, 2)).encode()[:-9] + b"\xff\n")
    expected = "only files without a whole first line, .*: rank-00000.jsonl, rank-00001.jsonl$"
    with pytest.raises(ValueError, match=expected):
        read_run(tmp_path)
    for rank in range(20):
        path_of(tmp_path, rank).write_text("{")
    with pytest.raises(ValueError, match=r"rank-00011\.jsonl and 8 more$"):
        read_run(tmp_path)


def test_ranks_without_a_readable_file_are_listed_as_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=4, steps=3))
    assert (run.missing, run.missing_text()) == ([], None)
    path_of(tmp_path, 0).unlink()
    path_of(tmp_path, 2).write_text("")
    run = read_run(tmp_path)
    assert run.missing == [0, 2]
    assert run.missing_text() == (
        "ranks 0, 2",
        "no record found: the file is missing, or without a whole first line",
    )


def test_sample_total_of_earlier_version_is_summed_from_written_steps(
    tmp_path: Path,
) -> None:
    lines = lines_of(0, 1, 20)
    for line in lines:
        line.pop("samples_so_far", None)
    path_of(tmp_path, 0).write_text("".join(map(as_text, lines)))
    (rank,) = read_run(tmp_path).ranks
    assert rank.steps[-1].samples_so_far == 20 * 32
