"""For any lines in a record, its readers show the valid ones and count the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtopk.cli.report import page
from gtopk.cli.top import as_lines, status_of
from gtopk.telemetry.lines import MOST_RANKS, as_text, path_of
from gtopk.telemetry.reading import Reader, read_run
from tests.gtopk.made_runs import begin, lines_of, write_run

FORGED = [
    *(None, True, -1, 10**12, 10**30, 1e308, -1e308, 0.5, "", "many", "\x1b[2J", [], [1], {}),
    {"": 1.0},
    {"a": "b"},
    {"loss": 1e308},
    {"lo\udce8ss": 1.0},
    *(0, 0.0, -0.004, "\udce8", "a\u202eb"),
]


def shown(folder: Path) -> str:
    """Return the output of `gtopk report` and `gtopk top` for a record."""
    run = read_run(folder)
    statuses = status_of(Reader(folder, 50).read(), folder)
    drawn = page(run, "a run") if any(rank.steps for rank in run.ranks) else ""
    output = "\n".join([drawn, *as_lines(statuses), *as_lines(statuses, 80)])
    assert output.encode()
    return output


def write(folder: Path, lines: list[dict[str, Any]], rank: int = 0) -> None:
    path = path_of(folder, rank)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forged_lines_do_not_prevent_the_report(tmp_path: Path, data: st.DataObject) -> None:
    lines = [dict(line) for line in lines_of(0, 2, 6)]
    write_run(tmp_path, ranks=2, steps=6)
    for _ in range(data.draw(st.integers(1, 3))):
        line = lines[data.draw(st.integers(1, len(lines) - 1))]
        name = data.draw(st.sampled_from(sorted(line)))
        if data.draw(st.booleans()):
            line.pop(name)
        else:
            line[name] = data.draw(st.sampled_from(FORGED))
    write(tmp_path, [line for line in lines if line])
    assert "\x1b" not in shown(tmp_path)


@pytest.mark.parametrize("name", sorted(begin().keys() - {"what", "format"}))
@pytest.mark.parametrize("value", FORGED, ids=repr)
def test_forged_begin_lines_do_not_prevent_the_report(
    tmp_path: Path, name: str, value: Any
) -> None:
    write_run(tmp_path, ranks=2, steps=6)
    lines = lines_of(0, 2, 6)
    write(tmp_path, [*lines, {**begin(0, 2), name: value}, *lines[1:]])
    assert "\x1b" not in shown(tmp_path)


@pytest.mark.parametrize("name", ["transport", "library", "gtopk", "torch", "python"])
@pytest.mark.parametrize("value", [None, 5])
def test_begin_line_without_a_required_field_is_ignored(
    tmp_path: Path, name: str, value: Any
) -> None:
    write_run(tmp_path, ranks=2, steps=6)
    first, *lines = lines_of(1, 2, 6)
    first = first | {name: value} if value else {k: v for k, v in first.items() if k != name}
    write(tmp_path, [first, *lines], rank=1)
    assert read_run(tmp_path).missing == [1]


@pytest.mark.parametrize("changes", [{"covers": ""}, {"hidden_seconds": 1.0, "working_seconds": 0}])
def test_implausible_steps_do_not_prevent_the_page(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert shown(write_run(tmp_path, **changes))


def test_skipped_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=6)
    lines = lines_of(0, 1, 6)
    (at, *_) = (place for place, line in enumerate(lines) if line["what"] == "step")
    deep = "[" * 100_000 + "]" * 100_000
    forged = [{**lines[at], "seconds": 1e308}, {**lines[at], "compute_seconds": "long"}]
    text = "".join(map(as_text, [*lines[: at + 1], *forged, *lines[at + 1 :]]))
    path_of(tmp_path, 0).write_text(f'{text}{{"what": {deep}}}\n')
    run = read_run(tmp_path)
    assert run.unsound == 2  # unparsable text does not count
    assert len(run.first.steps) == 6
    assert "skipped 2 lines of an unknown format" in page(run, "a run")


def test_implausible_number_of_ranks_raises(tmp_path: Path) -> None:
    write(tmp_path, [begin(0, MOST_RANKS + 1), *lines_of(0, 1, 3)[1:]])
    with pytest.raises(ValueError, match="has only files without a whole first line"):
        read_run(tmp_path)


def test_file_that_names_another_rank_is_not_read(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=2, steps=3)
    write(tmp_path, lines_of(1, 2, 3), rank=0)
    assert [rank.rank for rank in read_run(tmp_path).ranks] == [1]


@pytest.mark.parametrize("value", [1e308, -1e308, float("inf"), float("nan")])
def test_values_too_large_to_sum_are_shown_as_not_finite(tmp_path: Path, value: float) -> None:
    write_run(tmp_path, ranks=1, steps=3)
    lines = lines_of(0, 1, 3)
    notes = [
        {"what": "values", "seconds": 1.0, "step": step, "values": {"loss": value}}
        for step in range(2)
    ]
    path_of(tmp_path, 0).write_text("".join(map(as_text, [*lines[:-1], *notes, lines[-1]])))
    assert shown(tmp_path)
    assert [note.content["loss"] for note in read_run(tmp_path).first.values[-2:]] == [None, None]


@pytest.mark.parametrize(("norm", "read"), [(1e13, 1e13), (1e308, None), (float("inf"), None)])
def test_diverging_residual_is_read_as_a_valid_line(
    tmp_path: Path, norm: float, read: float | None
) -> None:
    write_run(tmp_path, ranks=1, steps=3)
    line = {"what": "withheld", "seconds": 1.0, "step": 3, "norm": norm, "age_steps": norm}
    with path_of(tmp_path, 0).open("a") as file:
        file.write(as_text(line))
    assert shown(tmp_path)
    run = read_run(tmp_path)
    assert run.skipped_text() is None
    assert run.first.residuals[-1].content["norm"] == read
    assert run.first.residuals[-1].content["age_steps"] == read


def test_control_characters_in_names_and_hosts_are_escaped(tmp_path: Path) -> None:
    lines = lines_of(0, 1, 3)
    lines[0]["host"] = "a\x1b]0;title\x07\x9b31mhost"
    note = {"what": "values", "seconds": 1.0, "step": 2, "values": {"\x1b[2Jloss": 1.0}}
    text = "right\u202eleft, an undecodable \udce8"
    message = {"what": "message", "seconds": 1.0, "step": 2, "level": "INFO", "text": text}
    write(tmp_path, [*lines[:-1], note, message, lines[-1]])
    output = shown(tmp_path)
    assert r"a\x1b]0;title\x07\x9b31mhost" in output
    assert r"\x1b[2Jloss" in output
    assert r"right\u202eleft, an undecodable \udce8" in output
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output)
    assert r"<h1>Run a\x1b[2Jrun\udce8</h1>" in page(read_run(tmp_path), "a\x1b[2Jrun\udce8")


def test_line_breaks_in_texts_add_no_table_rows(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=3)
    first, *lines, end = lines_of(0, 1, 3)
    how = "its program ended by ValueError: boom\n1  host1  ended"
    write(tmp_path, [{**first, "host": "a\n1\tb"}, *lines, {**end, "how": how, "in_order": False}])
    rows = as_lines(status_of(read_run(tmp_path), tmp_path))
    assert len(rows) == 2
    assert "a 1 b" in rows[1]
