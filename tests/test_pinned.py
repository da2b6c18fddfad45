"""Public names, wire bytes, and checkpoints and records of earlier code must not change.

`tests/pinned/made.py` describes each file, and writes it again after an intended change.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from collectives.transports import local_world, run_ranks
from gtopk.cli.report import as_record
from gtopk.runtime.world import world
from gtopk.telemetry.reading import read_run
from tests.gtopk.torch.checkpoint.run import Run
from tests.pinned import made

NAMES: dict[str, list[str] | None] = json.loads((made.HERE / "names.json").read_text())
WIRE: dict[str, str] = json.loads((made.HERE / "wire.json").read_text())
VALUES: list[dict[str, Any]] = json.loads((made.HERE / "values.json").read_text())


def test_every_public_name_is_still_there() -> None:
    assert sorted(NAMES.keys() - made.names().keys()) == []


@pytest.mark.parametrize("name", [name for name, pinned in NAMES.items() if pinned is not None])
def test_a_call_that_worked_still_works(name: str) -> None:
    pinned, now = NAMES[name], made.names_of(name)
    positional = [each for each in pinned if not each.startswith("(keyword)")]
    assert [each for each in now if each in positional] == positional
    assert set(pinned) <= set(now)
    added = [each for each in now if each not in pinned]
    assert all("=" in each or "*" in each for each in added)


@pytest.mark.parametrize("format", WIRE)
def test_a_message_has_the_bytes_that_it_had(format: str) -> None:
    assert made.messages()[format] == WIRE[format]


def test_a_checkpoint_of_earlier_code_is_loaded_whole(tmp_path: Path) -> None:
    folder = shutil.copytree(made.HERE / "checkpoint", tmp_path / "checkpoint")

    def load(transport: Any) -> dict[str, Any]:
        with world.entered(transport):
            run = Run()
            found = run.load(folder)
            assert (found.step, found.ranks) == (made.STEPS, made.RANKS)
            assert found.values == {"note": {"seen": made.STEPS}}
            return made.state(run)

    assert run_ranks(local_world(made.RANKS), load) == VALUES


def test_todays_checkpoint_has_the_files_and_keys_of_the_earlier_one(tmp_path: Path) -> None:
    run_ranks(local_world(made.RANKS), lambda t: made.trained(tmp_path / "a", tmp_path / "b", t))

    def shape(folder: Path) -> dict[str, Any]:
        return {
            path.relative_to(folder).as_posix(): keys(path) for path in sorted(folder.rglob("*.*"))
        }

    def keys(path: Path) -> Any:
        content = path.read_bytes()
        if path.suffix == ".json":
            return made.key_paths(json.loads(content))
        length = int.from_bytes(content[:8], "little")
        return sorted(json.loads(content[8 : 8 + length]))

    assert shape(tmp_path / "a") == shape(made.HERE / "checkpoint")


def test_a_record_of_earlier_code_is_read_whole() -> None:
    run = read_run(made.HERE / "run")
    assert not run.unsound
    assert not run.missing
    for rank in run.ranks:
        assert [step.report.step for step in rank.steps] == [*range(made.STEPS)]
        assert [step.samples_so_far for step in rank.steps] == [4 * n for n in range(1, 7)]
        assert {step.report.algorithm for step in rank.steps} == {"gtopk"}
        assert [note.content["loss"] for note in rank.values] == pytest.approx(
            [1 / (1 + step) for step in range(made.STEPS)]
        )
        assert all(note.content["norm"] > 0 for note in rank.residuals)
    assert as_record(run)


def test_todays_record_has_the_fields_of_the_earlier_one(tmp_path: Path) -> None:
    run_ranks(local_world(made.RANKS), lambda t: made.trained(tmp_path / "a", tmp_path / "b", t))

    def fields(folder: Path) -> dict[str, list[str]]:
        lines = (folder / "rank-00000.jsonl").read_text(encoding="utf-8").splitlines()
        return {line["what"]: sorted(line) for line in map(json.loads, lines)}

    earlier, now = fields(made.HERE / "run"), fields(tmp_path / "b")
    assert {what: set(names) - set(now[what]) for what, names in earlier.items()} == {
        what: set() for what in earlier
    }
