"""Failed training resumes from its last commit, in the same processes or in new ones."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from gtopk.errors import HorovodInternalError, HostsUpdatedInterrupt
from gtopk.torch.elastic import State, run_fn

PROGRAMS = Path(__file__).parents[3] / "programs"

# A separate limit, as the fixture below starts two jobs, each with its own.
pytestmark = pytest.mark.timeout(300)


class RecordingState(State):
    """A state that records its calls."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def save(self):
        self.log.append("save")

    def restore(self):
        self.log.append("restore")

    def sync(self):
        self.log.append("sync")

    def reset(self):
        self.log.append("on_reset")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (HorovodInternalError("x"), ["restore", "rejoin", "on_reset", "sync"]),
        (HostsUpdatedInterrupt(False), ["rejoin", "on_reset", "sync"]),
        (HostsUpdatedInterrupt(True), ["rejoin", "on_reset"]),
    ],
)
def test_calls_of_a_recovery_depend_on_the_error(raised, expected):
    log: list[str] = []

    def attempt(state, value, *, key):
        log.append("attempt")
        if log.count("attempt") == 1:
            raise raised
        return value + key

    train = run_fn(attempt, lambda: log.append("rejoin"))
    assert train(RecordingState(log), 1, key=2) == 3
    assert log == ["sync", "attempt", *expected, "attempt"]


def test_failure_after_a_host_update_is_restored_and_synchronized():
    log: list[str] = []
    raised = iter([HostsUpdatedInterrupt(True), HorovodInternalError("x")])

    def attempt(state):
        log.append("attempt")
        if error := next(raised, None):
            raise error

    run_fn(attempt, lambda: None)(RecordingState(log))
    words = ["sync", "attempt", "on_reset", "attempt", "restore", "on_reset", "sync", "attempt"]
    assert log == words


def test_attempts_that_commit_are_not_limited_in_number(ranks):
    def program(rank):
        attempts = []

        def attempt(state):
            attempts.append(1)
            state.commit()
            if len(attempts) < 50:
                raise HorovodInternalError("now and then")

        run_fn(attempt, lambda: None)(RecordingState([]))
        return len(attempts)

    assert ranks(1, program) == [50]


def load_job() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_job", PROGRAMS / "elastic_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_here(ranks, size):
    """Return each rank's result in a job of threads without failures."""
    job = load_job()
    return ranks(size, lambda rank: job.train(lambda epoch, batch: None))


def every_sample_once(trained):
    job = load_job()
    return trained.samples() == [list(range(job.SAMPLES))] * job.EPOCHS


class Killed(NamedTuple):
    """A job of 3 ranks; one was killed in the second epoch, a batch after commit 4.

    left: its folder of commits at that time; again: the same job, restarted.
    """

    first: Any
    left: Path
    again: Any


@pytest.fixture(scope="module")
def killed(mpirun, tmp_path_factory) -> Killed:
    where = tmp_path_factory.mktemp("killed")
    folder = where / "commits"
    arguments = ("1", "3", "1", str(where / "happened"))
    first = mpirun(3, "elastic_job.py", *arguments, GTOPK_ELASTIC_DIR=str(folder))
    left = shutil.copytree(folder, where / "left")
    return Killed(first, left, mpirun(3, "elastic_recovers.py", GTOPK_ELASTIC_DIR=str(folder)))


def test_killed_rank_ends_the_job_with_advice_on_restarting(killed):
    assert killed.first.returncode != 0
    # mpirun reports the signal, or the survivor that ended the job, whichever it learns of first.
    lost = r"rank [02] of 3 .*rank 1 is lost \("
    advice = lost + r".*restart it with GTOPK_ELASTIC_DIR=\S+ .*from commit 4"
    assert re.search(advice, killed.first.stderr), killed.first.stderr


def test_restart_with_as_many_ranks_gives_bit_identical_results(ranks, killed):
    assert killed.again.returncode == 0, killed.again.stderr
    assert "resuming from checkpoint 4 (step 8) in " in killed.again.stderr
    undisturbed = train_here(ranks, 3)[0]
    assert every_sample_once(undisturbed)
    # Bit-identical, as the ranks' residuals are restored too.
    lines = [line for line in killed.again.stdout.split("\n") if " of 3: " in line]
    assert sorted(lines) == [f"rank {rank} of 3: {undisturbed}" for rank in range(3)]


def test_restart_with_fewer_ranks_processes_the_remaining_samples(ranks, killed, monkeypatch):
    undisturbed = train_here(ranks, 3)[0]
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(killed.left))
    two = train_here(ranks, 2)
    assert [trained.digest for trained in two] == [two[0].digest] * 2
    assert every_sample_once(two[0])
    assert two[0].batches[1][:2] == undisturbed.batches[1][:2]
    assert {len(batch) for batch in two[0].batches[1][2:]} == {2 * load_job().BATCH}
    assert [trained.resets for trained in two] == [1, 1]


def test_live_ranks_recover_from_failures(killed):
    recovered = killed.again.stdout.count("every failure was survived")
    assert recovered == 3, killed.again.stdout + killed.again.stderr


def test_live_ranks_recover_when_rank_0_serves_the_rendezvous_store(torchrun):
    job = torchrun(3, "elastic_recovers.py", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("every failure was survived") == 3, job.stdout + job.stderr


def test_job_resumes_after_torchrun_restarts_all_ranks(ranks, torchrun, tmp_path):
    (undisturbed, _) = train_here(ranks, 2)
    job = torchrun(
        *(2, "elastic_job.py", "1", "3", "1", str(tmp_path / "killed")),
        restarts=1,
        GTOPK_ELASTIC_DIR=str(tmp_path / "commits"),
    )
    assert job.returncode == 0, job.stderr
    # The survivor names the lost rank, and says what to do without an agent; the agent may have
    # terminated it before it tried to continue.
    error = r"(rank 1 cannot rejoin this job \(|was stopped by SIGTERM .*, as )rank 1 is lost \("
    assert re.search(error, job.stderr), job.stderr
    assert "restart it with GTOPK_ELASTIC_DIR=" in job.stderr
    assert "resuming from checkpoint 5" in job.stderr
    assert sorted(job.stdout.split("\n"))[-2:] == [
        f"rank {rank} of 2: {undisturbed}" for rank in range(2)
    ]
