"""A host whose link is cut, among hosts that this machine emulates (root needed)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.faults.jobs import LAUNCHERS, PROGRAMS, plan
from tests.mpi_scripts.test_emulated_network import CANNOT, SCRIPT, environment

HOSTS = 3
TIMEOUT = 4.0


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    done = subprocess.run(
        [SCRIPT, "1", "10mbit", "torchrun", "true"], capture_output=True, text=True
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())


def train(launcher: str, argument: str, seconds: float) -> tuple[int, str, float]:
    """Return the exit code, what was said, and when all had ended."""
    program = [sys.executable, str(PROGRAMS / "faulty_training.py"), argument]
    done = subprocess.run(
        [SCRIPT, str(HOSTS), "100mbit", launcher, *program],
        env=environment(
            GTOPK_HEARTBEAT_TIMEOUT=str(TIMEOUT),
            HOROVOD_STALL_CHECK_TIME_SECONDS="1",
            OMP_NUM_THREADS="1",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout, time.time()


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_host_that_cannot_be_reached_is_named_and_ends_by_itself(launcher, tmp_path):
    fault = {"rank": 1, "phase": "backward", "step": 7, "way": "cut"}
    code, said, ended = train(launcher, plan(tmp_path, fault, steps=10_000, every=10_000), 300)
    assert code != 0
    fired = float(re.search(r"fired at ([\d.]+)", said)[1])
    print(f"{launcher}: all had ended {ended - fired:.1f} s after the cut", flush=True)
    assert re.search(
        r"gtopk: rank 1 \(host host1, pid \d+\): silent for .* the job ends when", said
    )
    for rank in (0, 2):
        lines = [line for line in said.splitlines() if f"gtopk: rank {rank} of {HOSTS} (" in line]
        named = [line for line in lines if re.search(r"rank 1 is lost \(silent for .*host1", line)]
        assert named, said
        assert re.search(r"at step [678]", named[-1]), named
    # The one that was cut off cannot tell its link from everybody else's.
    (own,) = [line for line in said.splitlines() if f"gtopk: rank 1 of {HOSTS} (" in line][-1:]
    assert "which hears no other rank" in own, own
    assert ended - fired < TIMEOUT + 6, said


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_link_that_comes_back_in_time_changes_no_bit(launcher, tmp_path):
    digests = []
    for fault in (None, {"rank": 1, "phase": "backward", "step": 7, "way": "cut for a while"}):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        code, said, _ = train(launcher, plan(folder, fault, steps=40, every=10_000), 300)
        assert code == 0, said
        digests += set(re.findall("digest (.*)", said))
    assert len(digests) == 2
    assert digests[0] == digests[1]
