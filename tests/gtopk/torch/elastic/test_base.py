"""The common parts of all states, and commits on disk, enabled in the environment."""

from __future__ import annotations

import errno
import os
import socket

import pytest

import gtopk.torch as hvd
from gtopk.errors import HostsUpdatedInterrupt
from gtopk.runtime.world import world
from gtopk.torch.checkpoint import CheckpointError
from gtopk.torch.checkpoint import archive as archives
from gtopk.torch.checkpoint.files import list_parts
from gtopk.torch.checkpoint.tree import unflatten
from gtopk.torch.elastic import ObjectState, State
from gtopk.torch.elastic.base import ADVICE, Commit, advice_of, open_archive, write_commit


def test_state_without_a_required_method_raises():
    for method in ("save", "restore", "sync"):
        with pytest.raises(NotImplementedError, match=rf"State must define {method}\(\)"):
            getattr(State(), method)()


def test_object_state_takes_horovods_arguments(ranks):
    def program(rank):
        state = ObjectState(lambda obj: {**obj, "value": "broadcast"}, lambda: 7, value=rank)
        state.sync()
        assert state.value == "broadcast"
        assert state._rank() == 7

    ranks(2, program)


@pytest.mark.parametrize("restored", [False, True])
def test_sync_sets_rank_0s_step_on_ranks_that_restored(ranks, restored):
    """One may have been a commit ahead; ranks that did not go back keep their steps."""

    def program(rank):
        here = world.current()
        here.resume(6 - 3 * rank)
        state = ObjectState(value=1)
        if restored:
            state.restore()
            state._resume_saved_step()
        state.sync()
        return here.step

    assert ranks(2, program) == [6, 6 if restored else 3]


def test_state_with_its_own_save_resumes_the_step_of_its_commit(ranks):
    class Own(ObjectState):
        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

    def program(rank):
        state = Own(value=1)
        world.current().resume(4)
        state.commit()
        world.current().resume(9)
        state.restore()
        state._resume_saved_step()
        return world.current().step

    assert ranks(2, program) == [4, 4]


def test_restore_undoes_in_place_changes_of_objects(ranks):
    def program(rank):
        state = ObjectState(values=[1, [2]])
        state.values[1].append(3)
        state.restore()
        assert state.values == [1, [2]]
        state.values[1].append(4)
        state.restore()
        assert state.values == [1, [2]]

    ranks(1, program)


@pytest.mark.parametrize(
    ("updates", "skip_sync"), [([1], True), ([2], False), ([3], False), ([1, 2], False)]
)
def test_host_update_on_one_rank_interrupts_all_at_the_same_commit(ranks, updates, skip_sync):
    def program(rank):
        state = ObjectState(value=1)
        state.commit()
        if rank == 2:
            for number, update in enumerate(updates):
                state.on_hosts_updated(10 + number, update)
        state.value = 2
        with pytest.raises(HostsUpdatedInterrupt) as interrupt:
            state.commit()
        assert interrupt.value.skip_sync is skip_sync
        state.value = 3
        state.restore()
        assert state.value == 2  # it was saved before
        state.commit()

    ranks(3, program)


def test_reset_discards_pending_host_updates(ranks):
    def program(rank):
        state = ObjectState()
        state.on_hosts_updated(1, 2)
        state.on_reset()
        state.commit()

    ranks(1, program)


# ---- commits on disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path / "commits"))
    return tmp_path / "commits"


def commit(rank, *values):
    """Write a commit per value; a rank's own part is [value, rank]."""
    archive = open_archive()
    for value in values:
        write_commit(archive, Commit({"value": value}, {"own": [value, rank]}))
    return archive


def test_open_archive_returns_none_without_a_folder(ranks, monkeypatch):
    monkeypatch.delenv("GTOPK_ELASTIC_DIR", raising=False)
    assert ranks(2, lambda rank: open_archive()) == [None, None]


def test_every_rank_finds_its_own_part_of_the_newest_commit(ranks, folder, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_KEEP", "3")
    ranks(2, lambda rank: commit(rank, *range(5)))
    assert sorted({part.number for part in list_parts(folder)}) == [3, 4, 5]
    found = ranks(2, lambda rank: open_archive().find())
    assert unflatten(found[0].tree, found[0].tensors) == {"value": 4}
    assert [each.state for f in found for each in f.owned] == [{"own": [4, r]} for r in range(2)]


def test_commit_has_the_highest_step_of_all_ranks(ranks, folder):
    """One ran out of batches, or ranks step independently."""

    def program(rank):
        world.current().step = 5 - rank
        commit(rank, "good")

    ranks(3, program)
    assert {(part.number, part.step) for part in list_parts(folder)} == {(1, 5)}
    assert [found.step for found in ranks(2, lambda rank: open_archive().find())] == [5, 5]


def test_every_rank_names_all_values_that_cannot_be_written(ranks, folder):
    def program(rank):
        archive = commit(rank, "good")
        bad = {"value": object() if rank == 0 else 1}, {"own": object() if rank == 2 else 1}
        with pytest.raises(CheckpointError) as error:
            write_commit(archive, Commit(*bad))
        return str(error.value), archive.number

    ((text, number), *others) = ranks(3, program)
    assert others == [(text, number)] * 2
    assert number == 1
    assert "GTOPK_ELASTIC_DIR" in text
    assert f"rank 0 (host {socket.gethostname()}): TypeError: value: " in text
    assert f"rank 2 (host {socket.gethostname()}): TypeError: own: " in text
    assert "rank 1 " not in text


def test_invalid_elastic_keep_is_refused(ranks, folder, monkeypatch):
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("GTOPK_ELASTIC_KEEP", wrong)
        with pytest.raises(ValueError, match=f"GTOPK_ELASTIC_KEEP .* at least 1, got '{wrong}'"):
            ranks(1, lambda rank: open_archive())


def test_advice_names_the_commit_that_a_restart_resumes(ranks, folder):
    def program(rank):
        archive = open_archive()
        before = advice_of(archive)
        write_commit(archive, Commit({}, {}))
        return before, advice_of(archive)

    ((before, after),) = ranks(1, program)
    assert "nothing is committed" in before
    assert f"GTOPK_ELASTIC_DIR={folder}" in after
    assert "from commit 1" in after
    assert "GTOPK_ELASTIC_DIR" in ADVICE


def test_second_state_in_a_folder_is_refused(ranks, folder):
    def program(rank):
        archive = open_archive()
        with pytest.raises(ValueError, match="keeps one state, and this is the second on rank"):
            open_archive()
        return archive.number

    assert ranks(2, program) == [0, 0]
    assert ranks(2, program) == [0, 0]  # after one is gone, there may be another


def test_second_state_is_refused_although_one_rank_deleted_the_first(ranks, folder):
    def program(rank):
        archive = open_archive()
        if rank == 0:
            del archive
        with pytest.raises(ValueError, match="keeps one state, and this is the second on rank 1;"):
            open_archive()

    ranks(2, program)


def test_every_rank_raises_when_one_cannot_create_the_folder(ranks, folder, monkeypatch):
    def failing(path):
        if hvd.rank() == 1:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        path.mkdir(exist_ok=True)
        return path

    monkeypatch.setattr(archives, "ensure_folder", failing)

    def program(rank):
        with pytest.raises(CheckpointError, match=r"created or listed: rank 1 .*Permission denied"):
            open_archive()

    ranks(2, program)


def test_commit_folder_stays_the_same_after_chdir(ranks, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", "commits")

    def program(rank):
        archive = open_archive()
        os.chdir(tmp_path / "other")
        write_commit(archive, Commit({}, {}))
        return advice_of(archive)

    (advice,) = ranks(1, program)
    assert {part.number for part in list_parts(tmp_path / "commits")} == {1}
    assert f"GTOPK_ELASTIC_DIR={tmp_path / 'commits'} " in advice
