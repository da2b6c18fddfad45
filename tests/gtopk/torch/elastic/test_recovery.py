"""Training that fails goes on from its last commit: the same processes, or others after them."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from gtopk.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from gtopk.torch.elastic import State, run_fn

PROGRAMS = Path(__file__).parents[3] / "programs"


class Told(State):
    """Writes down what is done to it."""

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
def test_what_follows_a_failure(raised, expected):
    log: list[str] = []

    def attempt(state, value, *, key):
        log.append("attempt")
        if log.count("attempt") == 1:
            raise raised
        return value + key

    train = run_fn(attempt, lambda: log.append("rejoin"))
    assert train(Told(log), 1, key=2) == 3
    assert log == ["sync", "attempt", *expected, "attempt"]


def test_a_failure_after_changed_hosts_is_synchronized_again():
    log: list[str] = []
    raised = iter([HostsUpdatedInterrupt(True), HorovodInternalError("x")])

    def attempt(state):
        log.append("attempt")
        if error := next(raised, None):
            raise error

    run_fn(attempt, lambda: None)(Told(log))
    words = ["sync", "attempt", "on_reset", "attempt", "restore", "on_reset", "sync", "attempt"]
    assert log == words


def test_attempts_that_get_on_are_not_counted(ranks):
    def program(rank):
        attempts = []

        def attempt(state):
            attempts.append(1)
            state.commit()
            if len(attempts) < 50:
                raise HorovodInternalError("now and then")

        run_fn(attempt, lambda: None)(Told([]))
        return len(attempts)

    assert ranks(1, program) == [50]


def test_ranks_that_all_live_recover_from_failures(mpirun):
    job = mpirun(3, "elastic_recovers.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every failure was survived") == 3, job.stdout + job.stderr


def load_job() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_job", PROGRAMS / "elastic_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_here(ranks, size):
    """Return what each rank of a job of threads, in which nothing happens, ends with."""
    job = load_job()
    return ranks(size, lambda rank: job.train(lambda epoch, batch: None))


def every_sample_once(trained):
    job = load_job()
    return trained.samples() == [list(range(job.SAMPLES))] * job.EPOCHS


def test_what_a_killed_rank_leaves_is_gone_on_from_by_as_many_ranks_or_fewer(
    ranks, mpirun, tmp_path, monkeypatch
):
    (undisturbed, *_) = train_here(ranks, 3)
    assert every_sample_once(undisturbed)
    folder, killed = tmp_path / "commits", str(tmp_path / "killed")
    arguments = ("1", "3", "1", killed)  # in the second epoch, a batch after a commit

    job = mpirun(3, "elastic_job.py", *arguments, GTOPK_ELASTIC_DIR=str(folder))
    assert job.returncode != 0
    assert re.search(r"rank 1 with PID \d+ .*\n?.*signal 9", job.stderr), job.stderr
    advice = rf"rank [02] of 3 .*start it again with GTOPK_ELASTIC_DIR={folder} .*from commit 4"
    assert re.search(advice, job.stderr), job.stderr
    shutil.copytree(folder, tmp_path / "for two")

    job = mpirun(3, "elastic_job.py", *arguments, GTOPK_ELASTIC_DIR=str(folder))
    assert job.returncode == 0, job.stderr
    assert f"going on from commit 4 in {folder}, made by 3 ranks, on 3" in job.stderr
    # To the bit: what the residuals held back is there again, too.
    assert sorted(job.stdout.split("\n")) == [
        f"rank {rank} of 3: {undisturbed}" for rank in range(3)
    ]

    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path / "for two"))
    two = train_here(ranks, 2)
    assert [trained.digest for trained in two] == [two[0].digest] * 2
    assert every_sample_once(two[0])
    assert two[0].batches[1][:2] == undisturbed.batches[1][:2]
    assert {len(batch) for batch in two[0].batches[1][2:]} == {2 * load_job().BATCH}
    assert [trained.resets for trained in two] == [1, 1]


def test_torchrun_restarts_all_and_they_go_on(ranks, torchrun, tmp_path):
    (undisturbed, _) = train_here(ranks, 2)
    job = torchrun(
        *(2, "elastic_job.py", "1", "3", "1", str(tmp_path / "killed")),
        restarts=1,
        GTOPK_ELASTIC_DIR=str(tmp_path / "commits"),
    )
    assert job.returncode == 0, job.stderr
    # The survivor says who is gone, and what to do where no agent does it.
    said = r"HorovodInternalError: rank 1 cannot join this job anew \(rank 1 left \(its connection "
    assert re.search(said, job.stderr), job.stderr
    assert "start it again with GTOPK_ELASTIC_DIR=" in job.stderr
    assert "going on from commit 5" in job.stderr
    assert sorted(job.stdout.split("\n"))[-2:] == [
        f"rank {rank} of 2: {undisturbed}" for rank in range(2)
    ]
