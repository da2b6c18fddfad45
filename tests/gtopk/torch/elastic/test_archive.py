"""Commits on disk: the newest that is whole is found, by as many ranks as there are then."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtopk.torch.elastic.archive import ADVICE, Snapshot, open_archive
from gtopk.torch.elastic.files import list_files, part_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path / "commits"))
    return tmp_path / "commits"


def commit(rank, *values):
    """Write a commit of each value; a rank's own part is [value, rank]."""
    archive = open_archive()
    for value in values:
        archive.write(Snapshot({"value": value}, {"own": [value, rank]}))
    return archive


def find(rank):
    return open_archive().find()


def numbers(folder):
    return sorted({file.number for file in list_files(folder)})


def test_without_a_folder_nothing_is_kept(ranks, monkeypatch):
    monkeypatch.delenv("GTOPK_ELASTIC_DIR", raising=False)
    assert ranks(2, lambda rank: open_archive()) == [None, None]


def test_an_empty_folder_holds_nothing(ranks, folder):
    assert ranks(2, find) == [None, None]
    assert folder.is_dir()


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_finds_its_own_part_of_the_newest_commit(ranks, folder, capfd, size):
    ranks(size, lambda rank: commit(rank, "old", "new"))
    found = ranks(size, find)
    assert [(f.number, f.ranks, f.names) for f in found] == [(2, size, ["value"])] * size
    assert found[0].replicated == {"value": "new"}
    assert [f.parts for f in found] == [[{"own": ["new", rank]}] for rank in range(size)]
    said = capfd.readouterr().err
    assert said.count("going on from commit 2 in") == 1
    assert str(folder) in said


@settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(before=st.integers(1, 5), after=st.integers(1, 5))
def test_on_other_ranks_every_part_is_found_once(ranks, folder, before, after):
    shutil.rmtree(folder, ignore_errors=True)
    ranks(before, lambda rank: commit(rank, "x"))
    found = ranks(after, find)
    assert {f.ranks for f in found} == {before}
    parts = [part["own"] for f in found for part in f.parts]
    assert sorted(parts) == [["x", rank] for rank in range(before)]
    # As evenly as can be.
    counts = [len(f.parts) for f in found]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("damage", ["absent", "cut", "flip"])
@pytest.mark.parametrize("part", ["all", part_of(1)])
def test_a_commit_that_is_not_whole_is_passed_over(ranks, folder, capfd, damage, part):
    ranks(2, lambda rank: commit(rank, "old", "new"))
    (path,) = folder.glob(f"commit-*2-of-2.{part}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    match damage:
        case "absent":
            path.unlink()
        case "cut":
            path.write_bytes(content[:-1])
        case "flip":
            path.write_bytes(content)
    found = ranks(2, find)
    assert found[0].replicated == {"value": "old"}
    assert [f.parts for f in found] == [[{"own": ["old", rank]}] for rank in range(2)]
    said = capfd.readouterr().err
    assert re.search(rf"commit 2 in .* is not whole: .*{path.name}", said), said
    assert "going on from commit 1" in said


def test_files_of_two_attempts_are_no_commit(ranks, folder, capfd):
    ranks(2, lambda rank: commit(rank, "old"))
    (path,) = folder.glob("*.rank-1")
    of_another = path.read_bytes()
    shutil.rmtree(folder)
    ranks(2, lambda rank: commit(rank, "new"))
    path.write_bytes(of_another)
    assert ranks(2, find) == [None, None]
    assert "its files are of several attempts" in capfd.readouterr().err


def test_no_number_is_used_twice(ranks, folder):
    """Else what is left of an attempt would make another's commit look whole."""
    ranks(2, lambda rank: commit(rank, "a", "b"))
    for path in folder.glob("commit-*2-of-2.all"):
        path.unlink()
    ranks(3, lambda rank: commit(rank, "c"))
    (found, *_) = ranks(3, find)
    assert (found.number, found.replicated) == (3, {"value": "c"})


def test_the_last_commits_are_kept(ranks, folder, monkeypatch):
    ranks(2, lambda rank: commit(rank, *range(5)))
    assert numbers(folder) == [4, 5]
    assert len(list(folder.iterdir())) == 2 * 3
    monkeypatch.setenv("GTOPK_ELASTIC_KEEP", "3")

    def go_on(rank):
        archive = open_archive()
        archive.find()
        archive.write(Snapshot({"value": "x"}, {}))
        return archive.number

    # The one gone on from counts; what was not chosen goes, whoever wrote it.
    assert ranks(1, go_on) == [6]
    assert numbers(folder) == [5, 6]
    assert len(list(folder.iterdir())) == 3 + 2


def test_each_host_may_have_a_folder_of_its_own(ranks, tmp_path, monkeypatch):
    """Rank 0 comes back on another host: what it needs is read where it is, and sent."""
    opened = []

    def program(homes, then):
        def of_rank(rank):
            import gtopk.torch.elastic.archive as module

            archive = module.Archive(Path(tmp_path / homes[rank]), 2)
            opened.append(archive)
            return then(rank, archive)

        return of_rank

    def write(rank, archive):
        archive.write(Snapshot({"value": "x"}, {"own": rank}))

    ranks(2, program(["a", "b"], write))
    assert sorted(path.name[-6:] for path in (tmp_path / "b").iterdir()) == ["rank-1"]
    found = ranks(2, program(["b", "a"], lambda rank, archive: archive.find()))
    assert found[0].replicated == {"value": "x"}
    assert [f.names for f in found] == [["value"]] * 2
    assert [f.parts for f in found] == [[{"own": 1}], [{"own": 0}]]


def test_who_cannot_write_is_named_on_every_rank_and_the_last_commit_stays(ranks, folder):
    def program(rank):
        archive = commit(rank, "good")
        bad = {"value": object() if rank == 0 else 1}, {"own": object() if rank == 2 else 1}
        with pytest.raises(RuntimeError) as error:
            archive.write(Snapshot(*bad))
        return str(error.value)

    said = ranks(3, program)
    assert len(set(said)) == 1
    assert "commit 2 cannot be written to" in said[0]
    assert "GTOPK_ELASTIC_DIR" in said[0]
    assert re.search(r"rank 0: .*object at \['state'\]\['value'\].*; rank 2: .*", said[0])
    assert "rank 1: " not in said[0]
    assert said[0].endswith("commit 1 is whole")
    assert ranks(3, find)[0].replicated == {"value": "good"}


def test_a_full_disk_is_named(ranks, folder):
    def program(rank):
        archive = open_archive()
        (folder / "commit-00000001-of-1.all.part").symlink_to("/dev/full")
        with pytest.raises(RuntimeError, match=r"rank 0: .*No space left.*there is no other"):
            archive.write(Snapshot({}, {}))

    ranks(1, program)


def test_wrong_settings_are_refused(ranks, folder, monkeypatch):
    for wrong in ("0", "-1", "many", ""):
        monkeypatch.setenv("GTOPK_ELASTIC_KEEP", wrong)
        with pytest.raises(ValueError, match=f"GTOPK_ELASTIC_KEEP .* at least 1, got '{wrong}'"):
            ranks(1, find)


def test_the_advice_says_where_the_job_goes_on(ranks, folder):
    def program(rank):
        archive = open_archive()
        before = archive.advice
        archive.write(Snapshot({}, {}))
        return before, archive.advice

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
