"""The end of the program reports the outcome of its last asynchronous save."""

from __future__ import annotations

import re

import pytest

from gtopk import CheckpointError, save_checkpoint
from tests.launchers import CODE_WHERE_A_RANK_EXITS
from tests.matrix import some_of

COMPLETE, LAST = "checkpoint-00000001-step-1", "checkpoint-00000002-step-2"
ENDINGS = [
    "its program ends",
    "shutdown",
    "termination",
    "the writing takes longer",
    "a thread of it lives on",
    "an exception is handled",
]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ending", some_of(ENDINGS, "its program ends", "shutdown", "termination"))
def test_job_fails_when_one_rank_cannot_write_its_last_save(mpirun, tmp_path, ending):
    job = mpirun(2, "saves_last.py", str(tmp_path), ending, "1")
    assert job.returncode in (1, CODE_WHERE_A_RANK_EXITS), job.stderr
    assert names_in(tmp_path) == [COMPLETE]
    if ending != "an exception is handled":  # the log may be closed by then
        error = r"rank 1: a checkpoint cannot be written: .*No space left on device"
        assert len(re.findall(error, job.stderr)) == 1  # when it happens
    error = (
        rf"CheckpointError: checkpoint 2 .* {tmp_path}: rank 1 .*No space.*checkpoint 1 is whole"
    )
    assert re.search(error, job.stderr), job.stderr


@pytest.mark.parametrize("ending", some_of(ENDINGS, "the writing takes longer"))
def test_job_ends_well_when_all_ranks_write_their_last_save(mpirun, tmp_path, ending):
    job = mpirun(2, "saves_last.py", str(tmp_path), ending, "-1")
    assert job.returncode == (143 if ending == "termination" else 0), job.stderr
    assert "checkpoint" not in job.stderr
    assert names_in(tmp_path) == [COMPLETE, LAST]


def test_first_rank_to_end_waits_for_the_others_without_timeout(mpirun, tmp_path):
    job = mpirun(2, "saves_last.py", str(tmp_path), "rank 0 takes longer", "1", GTOPK_TIMEOUT="2")
    assert job.returncode in (1, CODE_WHERE_A_RANK_EXITS)
    assert "has waited" not in job.stderr
    assert re.search("exit code 1, not 0: CheckpointError: checkpoint 2 .* rank 1 ", job.stderr)
    assert names_in(tmp_path) == [COMPLETE]


def test_rank_that_leaves_early_during_a_save_is_named(mpirun, tmp_path):
    job = mpirun(3, "saves_last.py", str(tmp_path), "the others go on", "-1", timeout=60)
    assert job.returncode != 0
    assert re.search(r"rank 1 left \(its program ended at step 1; host .*waited for", job.stderr)


def test_failed_last_saves_in_several_folders_are_all_reported(ranks, tmp_path):
    def program(rank):
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir(exist_ok=True)
            if rank == 1 and name != "b":
                (tmp_path / name / LAST.replace("2", "1")).touch()
        save_checkpoint(tmp_path / "b", None, None)  # no rank is ahead
        for name in ("a", "b", "c"):
            save_checkpoint(tmp_path / name, None, None, step=1, asynchronous=True)

    with pytest.raises(CheckpointError) as error:
        ranks(2, program)
    assert re.search(
        r"checkpoint 1 cannot be written to \S+/a: .*; checkpoint 1 cannot .*/c: ", str(error.value)
    )
    assert names_in(tmp_path / "b") == [
        "checkpoint-00000001-step-0",
        LAST.replace("step-2", "step-1"),
    ]
