"""Commits on disk, as the environment asks for them."""

from __future__ import annotations

import errno
import os
import socket

import pytest

import gtopk.torch as hvd
from gtopk.runtime.world import world
from gtopk.torch.checkpoint import CheckpointError
from gtopk.torch.checkpoint import archive as archives
from gtopk.torch.checkpoint.files import list_parts
from gtopk.torch.checkpoint.tree import put_together
from gtopk.torch.elastic.archive import ADVICE, Commit, advice_of, open_archive, write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path / "commits"))
    return tmp_path / "commits"


def commit(rank, *values):
    """Write a commit of each value; a rank's own part is [value, rank]."""
    archive = open_archive()
    for value in values:
        write(archive, Commit({"value": value}, {"own": [value, rank]}))
    return archive


def test_without_a_folder_nothing_is_kept(ranks, monkeypatch):
    monkeypatch.delenv("GTOPK_ELASTIC_DIR", raising=False)
    assert ranks(2, lambda rank: open_archive()) == [None, None]


def test_every_rank_finds_its_own_part_of_the_newest_commit(ranks, folder, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_KEEP", "3")
    ranks(2, lambda rank: commit(rank, *range(5)))
    assert sorted({part.number for part in list_parts(folder)}) == [3, 4, 5]
    found = ranks(2, lambda rank: open_archive().find())
    assert put_together(found[0].tree, found[0].tensors) == {"value": 4}
    assert [each.state for f in found for each in f.owned] == [{"own": [4, r]} for r in range(2)]


def test_ranks_that_have_counted_unlike_steps_commit_the_most(ranks, folder):
    """One ran out of batches, or its steps are its own."""

    def program(rank):
        world.current().step = 5 - rank
        commit(rank, "good")

    ranks(3, program)
    assert {(part.number, part.step) for part in list_parts(folder)} == {(1, 5)}
    assert [found.step for found in ranks(2, lambda rank: open_archive().find())] == [5, 5]


def test_what_cannot_be_written_is_named_on_every_rank(ranks, folder):
    def program(rank):
        archive = commit(rank, "good")
        bad = {"value": object() if rank == 0 else 1}, {"own": object() if rank == 2 else 1}
        with pytest.raises(CheckpointError) as error:
            write(archive, Commit(*bad))
        return str(error.value), archive.number

    ((said, number), *others) = ranks(3, program)
    assert others == [(said, number)] * 2
    assert number == 1
    assert "GTOPK_ELASTIC_DIR" in said
    assert f"rank 0 (host {socket.gethostname()}): TypeError: value: " in said
    assert f"rank 2 (host {socket.gethostname()}): TypeError: own: " in said
    assert "rank 1 " not in said


def test_wrong_settings_are_refused(ranks, folder, monkeypatch):
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("GTOPK_ELASTIC_KEEP", wrong)
        with pytest.raises(ValueError, match=f"GTOPK_ELASTIC_KEEP .* at least 1, got '{wrong}'"):
            ranks(1, lambda rank: open_archive())


def test_the_advice_says_where_the_job_goes_on(ranks, folder):
    def program(rank):
        archive = open_archive()
        before = advice_of(archive)
        write(archive, Commit({}, {}))
        return before, advice_of(archive)

    ((before, after),) = ranks(1, program)
    assert "nothing is committed" in before
    assert f"GTOPK_ELASTIC_DIR={folder}" in after
    assert "from commit 1" in after
    assert "GTOPK_ELASTIC_DIR" in ADVICE


def test_a_folder_keeps_one_state(ranks, folder):
    def program(rank):
        archive = open_archive()
        with pytest.raises(ValueError, match="keeps one state, and this is the second on rank"):
            open_archive()
        return archive.number

    assert ranks(2, program) == [0, 0]
    assert ranks(2, program) == [0, 0]  # after one is gone, there may be another


def test_a_second_state_is_refused_on_every_rank_where_one_has_forgotten_the_first(ranks, folder):
    def program(rank):
        archive = open_archive()
        if rank == 0:
            del archive
        with pytest.raises(ValueError, match="keeps one state, and this is the second on rank 1;"):
            open_archive()

    ranks(2, program)


def test_a_folder_that_one_rank_cannot_make_is_said_on_every_rank(ranks, folder, monkeypatch):
    def made(path):
        if hvd.rank() == 1:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        path.mkdir(exist_ok=True)
        return path

    monkeypatch.setattr(archives, "made", made)

    def program(rank):
        with pytest.raises(CheckpointError, match=r"made or listed: rank 1 .*Permission denied"):
            open_archive()

    ranks(2, program)


def test_a_folder_stays_where_it_is_when_the_script_changes_its_own(ranks, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", "commits")

    def program(rank):
        archive = open_archive()
        os.chdir(tmp_path / "other")
        write(archive, Commit({}, {}))
        return advice_of(archive)

    (advice,) = ranks(1, program)
    assert {part.number for part in list_parts(tmp_path / "commits")} == {1}
    assert f"GTOPK_ELASTIC_DIR={tmp_path / 'commits'} " in advice
