"""Hosts join and leave a running job: here, torchrun agents with two ranks each."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import ExitStack

import pytest

from tests.faults.jobs import PROGRAMS, Job, running


def agent(stack: ExitStack, port: int, enough: str, commits: str) -> Job:
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=elastic"),
        *("--rdzv-conf=last_call_timeout=3", "--max-restarts=3", "--no-python"),
        *(sys.executable, str(PROGRAMS / "elastic_grows.py"), enough),
    ]
    variables = {"GTOPK_ELASTIC_DIR": commits, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return stack.enter_context(running(words, 2, **variables))


def wait_for_store(port: int) -> None:
    """Wait until the first agent serves the store, which the others need to the end."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as client:
            if client.connect_ex(("localhost", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def begun(job: Job, ranks: int) -> list[int]:
    """Wait for the agent's ranks to start in a world of `ranks`; return their first steps."""
    return [int(m[1]) for m in job.expect(rf"begins on {ranks} at step (\d+)", times=2)]


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_elastic_job_survives_a_lost_host_and_takes_in_a_new_one(tmp_path):
    enough, commits = tmp_path / "enough", tmp_path / "commits"
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        first = agent(stack, port, str(enough), str(commits))
        wait_for_store(port)
        second = agent(stack, port, str(enough), str(commits))
        assert begun(first, 4) == [0, 0]
        while not commits.exists() or len(list(commits.iterdir())) < 2:
            time.sleep(0.05)
        for pid in second.processes():
            os.kill(pid, signal.SIGKILL)
        alone = begun(first, 2)
        assert alone[0] == alone[1] > 0
        third = agent(stack, port, str(enough), str(commits))
        together = begun(third, 4)
        assert together[0] == together[1] >= alone[0]
        first.expect("begins on 4", times=4)
        enough.touch()
        ends = [m[1] for job in (first, third) for m in job.expect("ends with (.*)", times=2)]
        assert len(ends) == 4
        assert len(set(ends)) == 1
        assert [job.process.wait(60) for job in (first, third)] == [0, 0]
