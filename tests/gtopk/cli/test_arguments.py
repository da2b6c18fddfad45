"""Numeric options must be finite and within their range."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from gtopk.cli.arguments import number_in, output_file, write_records
from gtopk.cli.completion import parsers

PARSERS = [
    *("gtopk.cli.plan", "gtopk.cli.simulate", "gtopk.cli.top"),
    *("gtopk.cli.bench.collectives", "gtopk.cli.bench.optimizer"),
    *("mpi_scripts.bench_selection", "mpi_scripts.bench_wire"),
]


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", ["1e-320", "0.5", "1"], ["0", "-0.0", "1.1", "-1", "nan", "inf", "", "half"]),
        ("[0, 1)", ["0", "0.99"], ["1", "-1e-9", "nan", "-inf"]),
        ("[1, inf)", ["1", "1e308"], ["0.9", "inf", "1e999", "nan"]),
    ],
)
def test_number_in_accepts_only_values_of_its_interval(
    interval: str, inside: list[str], outside: list[str]
) -> None:
    read = number_in(interval)
    assert [read(text) for text in inside] == [float(text) for text in inside]
    for text in outside:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            read(text)
        assert str(raised.value) == f"must lie in {interval}, got {text!r}"


@pytest.mark.parametrize("place", PARSERS)
def test_numeric_options_of_a_command_reject_nonfinite_values(place: str) -> None:
    actions: Any = importlib.import_module(place).parser()._actions
    numbers = 0
    for action in actions:
        for unit in ("", "s", "gbit"):
            if action.type is None or not is_number(action.type, f"1{unit}"):
                continue
            numbers += 1
            for text in ("nan", "inf", "-1", "1e999"):
                assert not is_number(action.type, text + unit), (action.dest, text + unit)
    assert numbers


MANY_DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "text", ["{}", "{}:2@3s", "{}@3s", "0,{}", "slow=1:{}", "host:{}", "{}mbit", "{}s", "{}M"]
)
def test_option_refuses_more_digits_than_python_converts(text: str) -> None:
    errors = []
    for described in parsers().values():
        for action in described._actions:
            if callable(action.type) and action.type is not Path:
                try:
                    action.type(text.format(MANY_DIGITS))
                except argparse.ArgumentTypeError as error:
                    errors.append(f"{action.dest}: {error}")
    assert errors
    assert not [error for error in errors if "set_int_max_str_digits" in error]


def test_full_disk_ends_a_command_with_the_file_and_the_reason() -> None:
    with pytest.raises(SystemExit, match=r"^gtopk: /dev/full cannot be written: No space left"):
        write_records({"a": 1}, Path("/dev/full"))


def is_number(read: Any, text: str) -> bool:
    """Tell whether an option accepts the text and reads it as a float."""
    try:
        return isinstance(read(text), float)
    except (argparse.ArgumentTypeError, ValueError):
        return False


def test_unwritable_json_file_exits_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for place in PARSERS[3:]:
        command = importlib.import_module(place)
        with pytest.raises(SystemExit) as ended:
            command.main(["--json", str(tmp_path / "file" / "below.json")])
        assert ended.value.code == 2
        assert "below.json cannot be written: " in capsys.readouterr().err


def test_output_file_check_keeps_the_content_of_the_file(tmp_path: Path) -> None:
    existing, absent = tmp_path / "existing.json", tmp_path / "new" / "absent.json"
    existing.write_text("{}")
    assert output_file(str(existing)) == existing
    assert existing.read_text() == "{}"
    assert output_file(str(absent)) == absent
    assert absent.parent.is_dir()
    assert not absent.exists()


def test_only_rank_0_checks_that_the_output_file_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    (tmp_path / "file").write_text("")
    output_file(str(tmp_path / "file" / "of another host.json"))
