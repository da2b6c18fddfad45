"""Checkpoints of all ranks: any number of ranks finds the newest complete one."""

from __future__ import annotations

import errno
import re
import shutil
import socket
from concurrent.futures import Future
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gtopk.torch as hvd
from gtopk.errors import CheckpointError
from gtopk.torch.checkpoint import archive as archives
from gtopk.torch.checkpoint.archive import Archive, Snapshot
from gtopk.torch.checkpoint.files import decode_with_checksum, encode_with_checksum, list_parts
from gtopk.torch.checkpoint.tree import flatten, unflatten


def snapshot(rank, value):
    """Return the state that all ranks share, with tensors, and a rank's own state."""
    replicated = flatten({"value": value, "tensor": torch.full((3,), len(value))})
    return Snapshot(10 * len(value), replicated, flatten([value, rank]))


def write(folder, rank, *values):
    """Write a checkpoint of each value."""
    archive = Archive(folder, 2)
    for value in values:
        archive.write(snapshot(rank, value)).wait()
    return archive


def find(folder):
    return lambda rank: Archive(folder, 2).find()


def value_of(found):
    state = unflatten(found.tree, found.tensors)
    assert state["tensor"].tolist() == [len(state["value"])] * 3
    return state["value"]


def owned(found):
    """Return the ranks' own saved states that each rank gets."""
    return [[(each.rank, *each.state) for each in one.owned] for one in found]


def numbers(folder):
    return sorted({part.number for part in list_parts(folder)})


def test_find_returns_none_in_an_empty_folder(ranks, tmp_path):
    assert ranks(2, find(tmp_path / "new")) == [None, None]
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_finds_its_own_part_of_the_newest_checkpoint(ranks, tmp_path, capfd, size):
    ranks(size, lambda rank: write(tmp_path, rank, "old", "newer"))
    found = ranks(size, find(tmp_path))
    assert [(f.number, f.step, f.ranks) for f in found] == [(2, 50, size)] * size
    assert value_of(found[0]) == "newer"
    assert {str(f.tree) for f in found} == {str(found[0].tree)}
    assert owned(found) == [[(rank, "newer", rank)] for rank in range(size)]
    output = capfd.readouterr().err
    assert output.count("resuming from checkpoint 2 (step 50) in") == 1
    assert str(tmp_path) in output


@settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(before=st.integers(1, 5), after=st.integers(1, 5))
def test_each_part_is_found_once_on_another_number_of_ranks(ranks, tmp_path, before, after):
    shutil.rmtree(tmp_path, ignore_errors=True)
    ranks(before, lambda rank: write(tmp_path, rank, "x"))
    found = ranks(after, find(tmp_path))
    assert {f.ranks for f in found} == {before}
    parts = owned(found)
    assert sorted(chain.from_iterable(parts)) == [(rank, "x", rank) for rank in range(before)]
    assert all(of % after == rank for rank, own in enumerate(parts) for of, *_ in own)


@pytest.mark.parametrize("damage", ["absent", "cut", "flip"])
@pytest.mark.parametrize("file", ["all-of-2.json", "all-of-2.safetensors", "rank-1-of-2.json"])
def test_damage_on_one_rank_makes_all_find_the_previous_checkpoint(
    ranks, tmp_path, capfd, damage, file
):
    ranks(2, lambda rank: write(tmp_path, rank, "old", "newer"))
    (path,) = tmp_path.glob(f"checkpoint-*2-step-50/{file}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "absent":
            path.unlink()
        case "cut":
            path.write_bytes(content[:-1])
        case "flip":
            path.write_bytes(content)
    found = ranks(2, find(tmp_path))
    assert value_of(found[0]) == "old"
    assert owned(found) == [[(rank, "old", rank)] for rank in range(2)]
    output = capfd.readouterr().err
    where = (
        "" if damage == "absent" and file.endswith("json") else rf"rank {int('1' in file)} \(host "
    )
    assert re.search(rf"checkpoint 2 in .* is not whole: .*{where}.*{file}", output), output
    assert "resuming from checkpoint 1" in output


def test_find_raises_when_all_checkpoints_are_damaged(ranks, tmp_path):
    ranks(2, lambda rank: write(tmp_path, rank, "old", "newer"))
    for path in tmp_path.glob("*/rank-1-of-2.json"):
        path.write_bytes(path.read_bytes()[:-5])

    def program(rank):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint in .* is whole: rank 1 \(host .*\): "
        ) as error:
            Archive(tmp_path, 2).find()
        return str(error.value)

    text, other = ranks(2, program)
    assert text == other
    assert text.count("rank-1-of-2.json: it is truncated") == 2


def test_find_returns_none_when_no_checkpoint_was_ever_complete(ranks, tmp_path, capfd):
    """A job killed in its first save starts from the beginning when restarted."""
    ranks(2, lambda rank: write(tmp_path, rank, "x"))
    for path in tmp_path.glob("*/rank-0-of-2.json"):
        path.unlink()
    assert ranks(2, find(tmp_path)) == [None, None]
    assert "rank-0-of-2.json missing" in capfd.readouterr().err


def test_find_returns_none_after_several_incomplete_first_saves(ranks, tmp_path):
    def killed(rank):
        archive = Archive(tmp_path, 2)
        assert archive.find() is None
        if rank == 1:  # rank 0 stops here
            archive.write(snapshot(rank, "x"))

    for _ in range(3):
        ranks(2, killed)
    assert numbers(tmp_path) == [1, 2, 3]
    assert ranks(2, find(tmp_path)) == [None, None]


@pytest.mark.parametrize("saved", ["ab", "abc"])
def test_find_raises_when_a_hosts_files_are_lost(ranks, tmp_path, saved):
    """A host was replaced, or a copy missed a rank's files; each run saved some of them."""

    def first(rank):
        for value in saved:
            write(tmp_path / str(rank), rank, value)

    def then(rank):
        archive = Archive(tmp_path / str(rank), 2)
        with pytest.raises(CheckpointError) as error:
            archive.find()
        archive.write(snapshot(rank, "new")).wait()
        return str(error.value).replace(str(archive.folder), "F")

    ranks(2, first)
    there = numbers(tmp_path / "0")
    shutil.rmtree(tmp_path / "1")
    text, other = ranks(2, then)
    assert text == other
    assert text.startswith("no checkpoint in F is whole: checkpoint ")
    for number in there:
        lost = f"checkpoint-{number:08d}-step-10/rank-1-of-2.json"
        assert f"checkpoint {number} lacks {lost}" in text
    assert numbers(tmp_path / "0") == [*there, len(saved) + 1]  # they may still be restored


def test_incomplete_checkpoint_is_removed_once_a_complete_one_is_found(ranks, tmp_path):
    def broken_off(rank):
        archive = Archive(tmp_path, 2)
        if rank == 1:
            archive.write(snapshot(rank, "x"))

    def start(rank):
        write(tmp_path, rank, "new")

    ranks(2, broken_off)
    ranks(2, start)
    assert numbers(tmp_path) == [1, 2]
    ranks(2, start)
    assert numbers(tmp_path) == [2, 3]


def test_checkpoint_that_cannot_be_read_now_is_skipped_and_kept(
    ranks, tmp_path, monkeypatch, capfd
):
    """A temporary failure of a file server damages nothing."""
    ranks(2, lambda rank: write(tmp_path, rank, "old", "newer"))
    read = archives.read_part

    def failing(folder, part):
        if (part.number, part.name) == (2, "rank-1"):
            raise OSError(errno.EIO, "Input/output error", part.file)
        return read(folder, part)

    def go_on(rank):
        archive = Archive(tmp_path, 1)
        found = archive.find()
        archive.write(snapshot(rank, "x")).wait()
        return found

    monkeypatch.setattr(archives, "read_part", failing)
    assert value_of(ranks(2, go_on)[0]) == "old"
    assert re.search(r"checkpoint 2 .* rank 1 .*Input/output error", capfd.readouterr().err)
    assert numbers(tmp_path) == [2, 3]


def test_reader_finds_a_checkpoint_that_a_job_completed_meanwhile(ranks, tmp_path, monkeypatch):
    read = archives.read_part
    moves = iter(["newer"])

    def job_moves_on(folder, part):
        for value in moves:
            write(tmp_path, 0, value, value)
        return read(folder, part)

    def program(rank):
        write(tmp_path, rank, "old")
        reader = Archive(tmp_path, 2)
        monkeypatch.setattr(archives, "read_part", job_moves_on)
        found = reader.find()
        return found.number, value_of(found)

    assert ranks(1, program) == [(3, "newer")]


def test_every_rank_raises_when_one_cannot_list_the_folder(ranks, tmp_path, monkeypatch):
    listed = archives.list_parts

    def failing(folder):
        if hvd.rank() == 1:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return listed(folder)

    def program(rank):
        with pytest.raises(CheckpointError, match=r"created or listed: rank 1 .*Input/output"):
            Archive(tmp_path, 2)

    monkeypatch.setattr(archives, "list_parts", failing)
    ranks(2, program)


def test_checkpoint_of_a_later_format_is_refused_and_kept(ranks, tmp_path):
    """Otherwise an old version, started by mistake, would resume an older one and remove it."""
    ranks(2, lambda rank: write(tmp_path, rank, "old", "newer"))
    (path,) = tmp_path.glob("*-step-50/rank-1-of-2.json")
    path.write_bytes(encode_with_checksum({**decode_with_checksum(path.read_bytes()), "format": 2}))

    def program(rank):
        with pytest.raises(CheckpointError, match=r"rank 1 .*format is 2.*version of gtopk"):
            Archive(tmp_path, 2).find()

    ranks(2, program)
    assert numbers(tmp_path) == [1, 2]


def test_files_of_several_attempts_are_refused(ranks, tmp_path):
    ranks(2, lambda rank: write(tmp_path, rank, "old"))
    (path,) = tmp_path.glob("*/rank-1-of-2.json")
    of_another = path.read_bytes()
    shutil.rmtree(tmp_path)
    ranks(2, lambda rank: write(tmp_path, rank, "new"))
    path.write_bytes(of_another)

    def program(rank):
        with pytest.raises(CheckpointError, match="are of several attempts"):
            Archive(tmp_path, 2).find()

    ranks(2, program)


def test_number_of_an_incomplete_checkpoint_is_not_used_again(ranks, tmp_path):
    """Otherwise the remains of an attempt could make another's checkpoint look complete."""
    ranks(2, lambda rank: write(tmp_path, rank, "a", "b"))
    for path in tmp_path.glob("*2-step-10/all-of-2.json"):
        path.unlink()
    ranks(3, lambda rank: write(tmp_path, rank, "c"))
    (found, *_) = ranks(3, find(tmp_path))
    assert (found.number, value_of(found)) == (3, "c")


def test_only_the_newest_checkpoints_are_kept(ranks, tmp_path):
    ranks(2, lambda rank: write(tmp_path, rank, *"abcde"))
    assert numbers(tmp_path) == [4, 5]
    assert len(list(tmp_path.iterdir())) == 2

    def go_on(rank):
        archive = Archive(tmp_path, 3)
        archive.find()
        archive.write(snapshot(rank, "f")).wait()
        return archive.number

    (tmp_path / "checkpoint-00000001-step-3").mkdir()  # left by a killed job
    assert ranks(1, go_on) == [6]
    assert numbers(tmp_path) == [4, 5, 6]
    assert len(list(tmp_path.iterdir())) == 3


def test_damaged_checkpoint_does_not_count_among_those_kept(ranks, tmp_path):
    ranks(2, lambda rank: write(tmp_path, rank, "old", "newer"))
    for path in tmp_path.glob("*-step-50/rank-1-of-2.json"):
        path.write_bytes(b"")

    def go_on(rank):
        archive = Archive(tmp_path, 2)
        archive.find()
        archive.write(snapshot(rank, "x")).wait()

    ranks(2, go_on)
    assert numbers(tmp_path) == [1, 3]


def test_each_host_may_have_its_own_folder(ranks, tmp_path):
    """Rank 0 restarts on another host: a rank that has its files reads and sends them."""

    def on(homes, then):
        return lambda rank: then(rank, Archive(tmp_path / homes[rank], 2))

    ranks(2, on("ab", lambda rank, archive: archive.write(snapshot(rank, "x")).wait()))
    assert {path.stem for path in (tmp_path / "b").glob("*/*")} == {"rank-1-of-2"}
    found = ranks(2, on("ba", lambda rank, archive: archive.find()))
    assert [value_of(each) for each in found] == ["x", "x"]
    assert owned(found) == [[(1, "x", 1)], [(0, "x", 0)]]


def test_failed_write_is_named_on_every_rank_and_the_last_one_kept(ranks, tmp_path):
    def failing(task):
        outcome: Future[str] = Future()
        outcome.set_result("no space left")
        return outcome

    def program(rank):
        archive = write(tmp_path, rank, "good")
        with pytest.raises(CheckpointError) as error:
            archive.write(snapshot(rank, "bad"), failing if rank == 2 else None).wait()
        return str(error.value)

    errors = ranks(3, program)
    expected = (
        f"checkpoint 2 cannot be written to {tmp_path}: rank 2 (host {socket.gethostname()}): "
        "no space left; checkpoint 1 is whole"
    )
    assert errors == [expected] * 3
    assert numbers(tmp_path) == [1]
    assert value_of(ranks(3, find(tmp_path))[0]) == "good"


def test_lost_folder_of_one_rank_raises_the_same_error_on_all(ranks, tmp_path):
    """The folder is on a host's own disk or on a shared one; nothing can be removed there."""

    def program(rank):
        folder = tmp_path / str(rank)
        archive = write(folder, rank, "good")
        if rank == 1:
            shutil.rmtree(folder)
            folder.touch()
        with pytest.raises(CheckpointError) as error:
            archive.write(snapshot(rank, "bad")).wait()
        return str(error.value).split(": ", 1)[1]

    errors = ranks(2, program)
    assert errors[0] == errors[1]
    assert re.fullmatch(
        r"rank 1 \(host \S+\): \[Errno 17\] File exists: .*; checkpoint 1 is whole", errors[0]
    )


@pytest.mark.parametrize("with_parent", [False, True])
def test_removed_folder_is_created_again(ranks, tmp_path, with_parent):
    folder = tmp_path / "a" / "b"
    lost = folder.parent if with_parent else folder

    def program(rank):
        archive = write(folder, rank, "lost")
        hvd.barrier()
        if rank == 0:
            shutil.rmtree(lost)
        hvd.barrier()
        archive.write(snapshot(rank, "new")).wait()
        archive.write(snapshot(rank, "newer")).wait()
        hvd.barrier()
        if rank == 0:
            shutil.rmtree(lost)
        hvd.barrier()
        archive.scan()
        assert archive.find() is None
        archive.write(snapshot(rank, "last")).wait()

    ranks(2, program)
    assert value_of(ranks(2, find(folder))[0]) == "last"


@pytest.mark.parametrize("size", [1, 3])
def test_second_job_in_a_folder_is_refused_and_harms_nothing(ranks, tmp_path, size):
    def begin(rank):
        return Archive(tmp_path, 2)

    second = ranks(size, begin)  # both listed the folder before either wrote

    def save(archives, value):
        return lambda rank: archives[rank].write(snapshot(rank, value)).wait()

    first = ranks(size, lambda rank: write(tmp_path, rank, "first"))

    def refused(rank):
        errors = set()
        for _ in range(2):
            with pytest.raises(CheckpointError) as error:
                save(second, "second")(rank)
            errors.add(str(error.value))
        return errors.pop() if len(errors) == 1 else errors

    errors = ranks(size, refused)
    assert set(errors) == {errors[0]}
    assert re.match(
        r"checkpoint 1 is not written to \S+, and nothing there is removed: ", errors[0]
    )
    assert "another job writes to this folder, too: checkpoint-00000001-step-50/" in errors[0]
    assert "Give each job a folder of its own" in errors[0]
    # The first one continues as if the other did not exist, and its checkpoint is found.
    ranks(size, save(first, "first, later"))
    assert set(map(str, ranks(size, refused))) == set(errors)
    assert value_of(ranks(size, find(tmp_path))[0]) == "first, later"
    assert numbers(tmp_path) == [1, 2]


def test_later_of_two_jobs_at_one_step_is_refused(ranks, tmp_path):
    late = ranks(2, lambda rank: Archive(tmp_path, 2))
    ranks(2, lambda rank: write(tmp_path, rank, "one"))

    def save(rank):
        with pytest.raises(CheckpointError, match="another job writes to this folder"):
            late[rank].write(snapshot(rank, "two")).wait()

    ranks(2, save)
    assert value_of(ranks(2, find(tmp_path))[0]) == "one"


def test_error_names_a_full_disk(ranks, tmp_path):
    def program(rank):
        archive = Archive(tmp_path, 2)
        (tmp_path / "checkpoint-00000001-step-10").mkdir()
        file = tmp_path / "checkpoint-00000001-step-10" / "all-of-1.safetensors.part"
        file.symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"rank 0 .*No space left.*there is no other"):
            archive.write(snapshot(rank, "x")).wait()

    ranks(1, program)
    assert list(tmp_path.iterdir()) == []
