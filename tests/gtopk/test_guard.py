"""No rank hangs: however one rank of a real MPI job ends, all end, and the reason is said."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

# How rank 2 of 3 ends at step 5 -> what somebody must say besides "step 5".
ENDINGS = {
    "exception": r"rank 2 of 3 .* failed at step 5: RuntimeError: boom",
    "exception with a live thread": r"rank 2 of 3 .* failed at step 5: RuntimeError: boom",
    "exception in a thread": r"rank 2 of 3 .* failed at step 5: ZeroDivisionError",
    "exit 0": r"rank 2 left \(its program ended at step 5; host .*, pid \d+\)",
    "exit 3": r"rank 2 left \(its program ended at step 5",
    "exit 0 with a live thread": r"rank 2 left \(its program ended at step 5",
    "early return": r"rank 2 left \(its program ended at step 5",
    "shutdown": r"rank 2 left \(called shutdown\(\) at step 5",
    "os._exit": r"rank 2 .*\n?.*exit",
    "killed": r"rank 2 with PID \d+ .*\n?.*signal 9",
    "segfault": r"rank 2 with PID \d+ .*\n?.*signal 11",
}


def runs(pid: str) -> bool:
    """Tell whether a process runs; one that has ended may wait for its parent's look (Z)."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_job_ends_and_names_rank_and_step(mpirun, ending):
    job = mpirun(3, "ends.py", ending, "2", timeout=60)
    assert job.returncode != 0
    assert re.search(ENDINGS[ending], job.stderr), job.stderr
    assert "at step 5" in job.stderr, job.stderr
    ended = re.findall(r"pid (\d+)", job.stdout)
    assert len(ended) == 3
    assert not [pid for pid in ended if runs(pid)]
    reached = [float(at) for at in re.findall(r"ending at ([\d.]+)", job.stdout)]
    assert len(reached) == 1
    assert time.time() - reached[0] < 10, "the promise is 10 s"


def test_rank_0_is_no_exception(mpirun):
    job = mpirun(3, "ends.py", "exit 0", "0", timeout=60)
    assert job.returncode != 0
    assert "rank 0 left (its program ended at step 5" in job.stderr


def test_a_job_that_ends_well_says_nothing(mpirun):
    job = mpirun(3, "ends.py", "well", "2", timeout=60)
    assert job.returncode == 0
    assert job.stderr == ""


def test_a_rank_that_ends_before_all_have_met_ends_the_start(mpirun):
    job = mpirun(2, "never_arrives.py", timeout=60, GTOPK_START_TIMEOUT="5")
    assert job.returncode != 0
    assert "Timeout (0:00:05)" in job.stderr
