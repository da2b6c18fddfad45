"""A frozen rank is warned about, then named and given up, unless it wakes in time."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest

from tests.faults.jobs import LAUNCHERS, Job, plan, start
from tests.faults.test_endings import RANKS, train

TIMEOUT = 4.0
ENVIRONMENT = {"GTOPK_HEARTBEAT_TIMEOUT": str(TIMEOUT), "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}


def assert_given_up(job: Job, culprit: int, since: float) -> float:
    """Check that a frozen rank is named; return after how many seconds all ranks had ended."""
    took = job.end(since, promised_seconds=TIMEOUT + 6)
    assert took > TIMEOUT - 0.5, job.text()
    assert job.process.returncode != 0
    job.assert_nothing_is_left()
    job.assert_survivors_name(culprit, None, "stopped for")
    assert re.search(
        rf"gtopk: rank {culprit} .*: stopped for [12]\.\d s .* the job ends", job.text()
    )
    # The culprit may report the others as lost, as they have ended the job by then.
    accused = {
        match[1]
        for line in job.lines
        if not line.startswith(f"gtopk: rank {culprit} of ")
        for match in re.finditer(r"rank (\d) (?:is lost|left) \(", line)
    }
    assert accused == {str(culprit)}, job.text()
    return took


def freeze(launcher: str, folder: str, culprit: int, after_seconds: float) -> float:
    argument = plan(folder, steps=10_000, every=10_000)
    with start(launcher, RANKS, "faulty_training.py", argument, **ENVIRONMENT) as job:
        job.begin()
        time.sleep(after_seconds)
        return assert_given_up(job, culprit, job.send(culprit, signal.SIGSTOP))


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_frozen_rank_is_named_and_the_job_ends(launcher, tmp_path):
    dice = random.Random(4711)
    took = []
    for _ in range(20):
        culprit = dice.randrange(RANKS)
        took.append(freeze(launcher, tmp_path, culprit, dice.uniform(0, 0.5)))
        print(f"{launcher}: rank {culprit} froze, all ended after {took[-1]:.2f} s", flush=True)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_freeze_briefly_change_no_bit(launcher, tmp_path):
    """Twenty times in one run."""
    dice = random.Random(4712)
    steps = 1600
    argument = plan(tmp_path / "disturbed", steps=steps, every=10_000, pause=0.02)
    with start(launcher, RANKS, "faulty_training.py", argument, **ENVIRONMENT) as job:
        job.begin()
        for _ in range(20):
            culprit = dice.randrange(RANKS)
            job.send(culprit, signal.SIGSTOP)
            time.sleep(dice.uniform(0.2, 0.5 * TIMEOUT))
            job.send(culprit, signal.SIGCONT)
            time.sleep(dice.uniform(0, 0.3))
        digests = {match[1] for match in job.expect("digest (.*)", seconds=600, times=RANKS)}
        assert job.process.wait(60) == 0
        assert re.search("gtopk: rank .* stopped for", job.text())
        assert re.search("gtopk: rank .* responds again", job.text())
        job.assert_nothing_is_left()
    assert {(steps, digest) for digest in digests} == {
        train(launcher, tmp_path / "undisturbed", steps)
    }


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.faults)])
def test_rank_that_wakes_in_time_continues_and_one_that_does_not_is_given_up(launcher, tmp_path):
    argument = plan(tmp_path, steps=10_000, every=10_000)
    with start(launcher, 3, "faulty_training.py", argument, **ENVIRONMENT) as job:
        job.begin()
        job.send(1, signal.SIGSTOP)
        job.expect(r"gtopk: rank 1 \(host .*\): stopped for")
        job.send(1, signal.SIGCONT)
        job.expect(r"gtopk: rank 1 \(host .*\) responds again")
        assert sorted(job.living()) == [0, 1, 2]
        assert_given_up(job, 2, job.send(2, signal.SIGSTOP))
