"""A file of a commit is there whole or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gtopk.objects import ObjectFormatError, encode
from gtopk.torch.elastic import files
from gtopk.torch.elastic.files import (
    File,
    list_files,
    part_of,
    parts_of,
    read_file,
    remove_files,
    write_file,
)

ROOT = Path(__file__).parents[4]


def test_what_is_written_is_listed_and_read(tmp_path):
    written = [File(3, 2, part) for part in parts_of(2)]
    for file in written:
        write_file(tmp_path, file, encode({"part": file.part}))
    assert sorted(list_files(tmp_path)) == sorted(written)
    assert [read_file(tmp_path, file) for file in written] == [{"part": f.part} for f in written]
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in written}


def test_the_names_are_those_drawn():
    drawn = re.findall(r"^    (\S+)", files.__doc__, re.MULTILINE)
    assert drawn == [File(42, 3, part).name for part in parts_of(3)]


def test_other_files_are_left_alone(tmp_path):
    mine = File(1, 1, part_of(0))
    write_file(tmp_path, mine, b"")
    others = [tmp_path / name for name in ("notes.txt", "commit-1.all", "commit-1-of-1.all.txt")]
    (tmp_path / "commit-00000002-of-1.all.part").touch()
    for path in others:
        path.touch()
    assert list_files(tmp_path) == [mine]
    removed = []
    remove_files(tmp_path, lambda file: removed.append(file) or True)
    assert sorted(removed) == [mine, File(2, 1, "all")]
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("change", ["flip", "cut", "empty"])
def test_a_damaged_file_is_an_error(tmp_path, change):
    file, content = File(1, 1, "all"), bytearray(encode({"values": list(range(100))}))
    match change:
        case "flip":
            content[len(content) // 2] ^= 4
        case "cut":
            del content[-1:]
        case "empty":
            content.clear()
    write_file(tmp_path, file, bytes(content))
    with pytest.raises(ObjectFormatError):
        read_file(tmp_path, file)


def test_a_failed_write_leaves_the_file_of_before(tmp_path):
    file = File(1, 1, "all")
    write_file(tmp_path, file, encode("before"))
    (tmp_path / f"{file.name}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path, file, encode("after"))
    assert read_file(tmp_path, file) == "before"


def test_whatever_moment_a_writer_is_killed_at_its_files_are_whole(tmp_path):
    program = ROOT / "tests" / "programs" / "elastic_killed_writer.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "40"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    killed_within_a_write, whole = map(int, done.stdout.split())
    # Else the writers have not been killed at the moments that this is about.
    assert killed_within_a_write > 0
    assert whole > 0
