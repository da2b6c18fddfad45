"""Many jobs on a host, or busy cores, are not mistaken for a fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from tests.faults.jobs import LAUNCHERS, plan, start

JOBS = 20
BUSY_SECONDS = 600
BURN = "while True: pass"


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_twenty_jobs_on_one_host_do_not_disturb_each_other(tmp_path):
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                start(launcher, 2, "faulty_training.py", plan(tmp_path / str(number), steps=20))
            )
            for number, launcher in zip(range(JOBS), LAUNCHERS * JOBS, strict=False)
        ]
        digests = [{m[1] for m in job.expect("digest (.*)", seconds=900, times=2)} for job in jobs]
        assert [job.process.wait(120) for job in jobs] == [0] * JOBS
        for job in jobs:
            job.assert_nothing_is_left()
    assert digests == [digests[0]] * JOBS
    assert len(digests[0]) == 1


@pytest.mark.faults
@pytest.mark.timeout(BUSY_SECONDS + 300)
def test_ranks_on_busy_cores_are_not_given_up(tmp_path):
    """Twice as many busy programs as cores run beside four ranks.

    A warning about a rank that gets no CPU time for half of the timeout is right.
    """
    busy = [
        subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    argument = plan(tmp_path, steps=10_000_000, every=10_000_000)
    try:
        with start("mpirun", 4, "faulty_training.py", argument, GTOPK_HEARTBEAT_TIMEOUT="5") as job:
            job.begin()
            deadline = time.monotonic() + BUSY_SECONDS
            while time.monotonic() < deadline:
                assert len(job.living()) == 4, job.text()
                time.sleep(1)
            assert not re.search(r"is lost|left \(|ends the job", job.text()), job.text()
    finally:
        for program in busy:
            program.kill()
            program.wait()
