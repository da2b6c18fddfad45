"""SIGTERM on a rank: all ranks save after the same step, and end with exit code 143."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.faults.jobs import LAUNCHERS, Job, start

CODE = 143
BY_FAULTS = pytest.mark.faults


def assert_saved_and_ended(job: Job, launcher: str, since: float, signalled: str) -> int:
    """Return the step after which all ranks have saved."""
    job.end(since)
    saved = job.expect(r"rank (\d) saves at (\d+) for \[(.*)\]", times=job.ranks)
    assert {match[1] for match in saved} == {str(rank) for rank in range(job.ranks)}
    (step,) = {int(match[2]) for match in saved}
    (ranks,) = {match[3] for match in saved}
    assert set(ranks.split(", ")) <= set(signalled.split(", "))
    for rank in range(job.ranks):
        line = rf"gtopk: rank {rank} of {job.ranks} \(host .*\) ends at step {step}, as ranks? "
        job.expect(rf"{line}[\d, ]+ received SIGTERM: exit code {CODE}")
    assert "goes on after its end" not in job.text()
    assert "was stopped by SIGTERM" not in job.text()
    if launcher == "mpirun":
        assert job.process.returncode == CODE, job.text()
    else:  # torchrun's own code is 1; its report has the first rank's
        assert re.search(rf"exitcode +: {CODE}", job.text()), job.text()
    job.assert_nothing_is_left()
    return step


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=BY_FAULTS)])
def test_sigterm_on_one_rank_makes_all_save_after_the_same_step(launcher, tmp_path: Path):
    with start(launcher, 3, "preempted.py", str(tmp_path), "0") as job:
        job.begin()
        step = assert_saved_and_ended(job, launcher, job.send(1, signal.SIGTERM), "1")
    (checkpoint,) = tmp_path.iterdir()
    assert checkpoint.name.endswith(f"-step-{step}")
    assert len(list(checkpoint.glob("*.json"))) == 4  # all ranks', and each rank's own


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_on_all_ranks_saves_and_the_next_job_resumes(launcher, tmp_path: Path):
    step = 0
    for _ in range(2):
        with start(launcher, 4, "preempted.py", str(tmp_path), "0.5") as job:
            assert job.begin() == step
            for rank in range(4):
                since = job.send(rank, signal.SIGTERM)
            step = assert_saved_and_ended(job, launcher, since, "0, 1, 2, 3")


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_second_sigterm_ends_the_rank_at_once(launcher, tmp_path: Path):
    with start(launcher, 4, "preempted.py", str(tmp_path), "60") as job:
        job.begin()
        job.send(2, signal.SIGTERM)
        job.expect("saves at", times=4)
        job.end(job.send(2, signal.SIGTERM))
        assert job.process.returncode != 0
        job.expect(r"gtopk: rank 2 of 4 .* was stopped by SIGTERM")
        job.assert_nothing_is_left()
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_sigterm_on_torchrun_makes_its_ranks_save(tmp_path: Path):
    with start("torchrun", 4, "preempted.py", str(tmp_path), "1") as job:
        job.begin()
        job.process.terminate()
        saved = {match[1] for match in job.expect(r"saves at (\d+)", times=4)}
        assert len(saved) == 1
        job.process.wait(60)
        job.expect(rf"exit code {CODE}", times=4)
        job.assert_nothing_is_left()
    assert len(list(tmp_path.rglob("*.json"))) == 5
