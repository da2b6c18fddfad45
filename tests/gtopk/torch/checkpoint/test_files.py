"""A part of a checkpoint exists completely or not at all, and damage is detected."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import stat
import subprocess
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open

from gtopk.errors import DamagedError, FormatError
from gtopk.torch.checkpoint import files
from gtopk.torch.checkpoint.files import (
    Content,
    Part,
    decode_with_checksum,
    encode_with_checksum,
    list_parts,
    name_of,
    parts_of,
    read_part,
    remove_checkpoints,
    write_part,
)
from gtopk.torch.checkpoint.tree import flatten

PART = Part(42, 1200, 2, name_of(1))


def content(value=0.0):
    return Content("word", flatten({"lr": 0.5, "weight": torch.full((300,), value)}))


def files_of(folder, part=PART):
    return sorted((folder / part.folder).iterdir())


def test_written_parts_are_listed_and_read(tmp_path):
    parts = parts_of(3, 7, 2)
    for number, part in enumerate(parts):
        write_part(tmp_path, part, content(number)._replace(before=number))
    assert sorted(list_parts(tmp_path)) == sorted(parts)
    for number, part in enumerate(parts):
        attempt, state, before = read_part(tmp_path, part)
        assert (attempt, before) == ("word", number)
        assert state.tree == {"lr": 0.5, "weight": {"$tensor": "weight"}}
        assert torch.equal(state.tensors["weight"], torch.full((300,), float(number)))


def test_file_names_are_as_the_docstring_draws(tmp_path):
    for part in parts_of(42, 1200, 2):
        write_part(tmp_path, part, content())
    drawn = re.findall(r"(?:all|rank-\d)-of-2\.\w+|checkpoint-\S+(?=/)", files.__doc__)
    written = [path.name for path in files_of(tmp_path)]
    assert sorted(drawn[1:]) == written
    assert drawn[0] == PART.folder


def test_files_are_readable_by_safetensors_json_and_sha256sum(tmp_path):
    """With only safetensors and a JSON parser; the checksum is that of sha256sum."""
    write_part(tmp_path, PART, content(3.0))
    path, tensors = files_of(tmp_path)
    record = json.loads(path.read_text())["part"]
    assert record["step"] == 1200
    assert record["state"]["lr"] == 0.5
    with safe_open(tensors, framework="pt") as file:
        assert file.get_tensor("weight")[0] == 3.0
    printed = subprocess.run(["sha256sum", tensors], capture_output=True, text=True, check=True)
    assert printed.stdout.split()[0] == record["tensors"]["sha256"]


def test_remove_checkpoints_leaves_other_files(tmp_path):
    write_part(tmp_path, PART, content())
    (tmp_path / "checkpoint-00000043-step-1300").mkdir()
    others = [tmp_path / name for name in ("notes.txt", "checkpoint-43", "checkpoint-1-step-x")]
    for path in others:
        path.mkdir()
    (tmp_path / PART.folder / "rank-0-of-2.json.part").touch()
    assert list_parts(tmp_path) == [PART]
    removed = []
    remove_checkpoints(tmp_path, lambda number: removed.append(number) or True)
    assert sorted(removed) == [42, 43]
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("kind", [".json", ".safetensors"])
def test_any_damage_to_a_file_is_detected_and_names_the_file(tmp_path, kind):
    write_part(tmp_path, PART, content())
    (path,) = (tmp_path / PART.folder).glob(f"*{kind}")
    intact = path.read_bytes()
    places = range(0, len(intact), 7)
    damages = [intact[:place] for place in places]
    damages += [intact[:p] + bytes([intact[p] ^ 1 << p % 8]) + intact[p + 1 :] for p in places]
    damages += [b"", intact + b"\0", intact + intact]
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=rf"^{PART.folder}/{path.name}: "):
            read_part(tmp_path, PART)
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        read_part(tmp_path, PART)


def test_file_of_another_part_is_detected(tmp_path):
    other = PART._replace(name="all")
    write_part(tmp_path, other, content())
    shutil.copytree(tmp_path / PART.folder, tmp_path / "copy")
    for suffix in (".json", ".safetensors"):
        (tmp_path / other.file).with_suffix(suffix).rename(
            (tmp_path / PART.file).with_suffix(suffix)
        )
    with pytest.raises(DamagedError, match=r"it belongs to .*/all-of-2\.json"):
        read_part(tmp_path, PART)


def test_file_of_another_format_raises_a_format_error(tmp_path):
    write_part(tmp_path, PART, content())
    path = tmp_path / PART.file
    path.write_bytes(encode_with_checksum({**decode_with_checksum(path.read_bytes()), "format": 2}))
    with pytest.raises(FormatError, match=r"rank-1-of-2\.json: its format is 2, .* reads 1"):
        read_part(tmp_path, PART)


def test_error_names_what_is_wrong_with_a_record(tmp_path):
    write_part(tmp_path, PART, content())
    path = tmp_path / PART.file
    valid = decode_with_checksum(path.read_bytes())
    lacking = {key: value for key, value in valid.items() if key != "step"}
    for record, message in [
        ([1, 2], "it must hold a dict, got list"),
        (None, "it must hold a dict, got NoneType"),
        ({**valid, "before": "4"}, "its 'before' must be an integer, got '4'"),
        (lacking, "it lacks 'step'"),
        ({**valid, "step": None}, "it belongs to checkpoint-00000042-step-None/rank-1-of-2.json"),
    ]:
        path.write_bytes(encode_with_checksum(record))
        with pytest.raises(DamagedError) as error:
            read_part(tmp_path, PART)
        assert str(error.value) == f"{PART.file}: {message}"


def test_list_parts_skips_a_checkpoint_that_is_removed_meanwhile(tmp_path, monkeypatch):
    for number in (1, 2):
        write_part(tmp_path, PART._replace(number=number), content())
    listed = files._checkpoints

    def removing_the_first(folder):
        for path, match in listed(folder):
            if int(match[1]) == 1:
                shutil.rmtree(path)
            yield path, match

    monkeypatch.setattr(files, "_checkpoints", removing_the_first)
    assert list_parts(tmp_path) == [PART._replace(number=2)]


@pytest.mark.parametrize(("number", "is_gone"), [(errno.ESTALE, True), (errno.EIO, False)])
def test_folder_that_cannot_be_listed_raises_unless_it_is_gone(
    tmp_path, monkeypatch, number, is_gone
):
    listed = os.listdir

    def refuse(path):
        if os.fspath(path).endswith(PART.folder):
            raise OSError(number, "refused", str(path))
        return listed(path)

    write_part(tmp_path, PART, content())
    monkeypatch.setattr(files.os, "listdir", refuse)
    with nullcontext() if is_gone else pytest.raises(OSError, match=PART.folder):
        assert list_parts(tmp_path) == []


def limited(write):
    """Write with a limit of 1000 bytes per file, as on a disk that fills up within a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("full", ["json", "safetensors", "in the middle"])
def test_full_disk_raises_and_leaves_no_partial_file(tmp_path, full):
    write_part(tmp_path, PART, content(1.0))
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    if full == "in the middle":
        with pytest.raises(OSError, match=r"File too large|file too large"):
            limited(lambda: write_part(tmp_path, PART, content(2.0)))
    else:
        beside = (tmp_path / PART.file).with_suffix(f".{full}.part")
        beside.symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            write_part(tmp_path, PART, content(2.0))
    after = {path: path.read_bytes() for path in files_of(tmp_path)}
    assert after.keys() == before.keys()
    if full != "json":  # else the tensors are new, and the JSON's checksum differs
        assert after == before


@pytest.mark.parametrize("limit", ["_MOST_JSON_BYTES", "_MOST_HEADER_BYTES"])
def test_part_too_large_to_be_read_is_refused_when_written(tmp_path, monkeypatch, limit):
    """Otherwise all kept checkpoints could be unreadable."""
    write_part(tmp_path, PART, content(1.0))
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    monkeypatch.setattr(files, limit, 20)
    with pytest.raises(ValueError, match=r"bytes, and at most 20 are read: save "):
        write_part(tmp_path, PART, content(1.0))
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EBADF])
def test_file_system_that_cannot_sync_folders_is_supported(tmp_path, monkeypatch, refusal):
    synced = []

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_part(tmp_path, PART, content(1.0))
    assert len(synced) == 2  # the files must still be synced to disk
    assert torch.equal(read_part(tmp_path, PART).state.tensors["weight"], torch.ones(300))


def test_file_that_cannot_be_synced_raises(tmp_path, monkeypatch):
    def fsync(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Invalid argument"):
        write_part(tmp_path, PART, content(1.0))
    assert files_of(tmp_path) == []
