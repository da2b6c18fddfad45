"""The same laws and reductions under mpirun, torchrun and horovodrun, and what ends a wait."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.matrix import some_of
from tests.programs.collectives_transports import LAWS


def assert_every_rank_prints(job: Any, ranks: int, sentence: str) -> None:
    assert job.returncode == 0, job.stderr
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("rank"))
    assert len(lines) == ranks, job.stdout + job.stderr
    for rank, line in enumerate(lines):
        assert re.fullmatch(rf"rank {rank} of {ranks}: {sentence}", line)


def assert_long_wait_was_announced(job: Any, ranks: int) -> None:
    stalled = rf"^gtopk: rank 0 has waited [\d.]+ s for rank {ranks - 1} in a long wait$"
    assert re.search(stalled, job.stderr, re.MULTILINE)


@pytest.mark.parametrize("ranks", some_of([1, 2, 3, 4], 3))
def test_transport_laws_hold_under_mpirun(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "collectives_transports.py", "mpi")
    assert_every_rank_prints(job, ranks, rf"{len(LAWS)} laws hold")


@pytest.mark.parametrize("level", ["serialized", "multiple"])
def test_mpi_threads_take_turns_when_the_thread_level_requires_it(mpirun, level: str) -> None:
    job = mpirun(3, "mpi_threads.py", level)
    assert_every_rank_prints(job, 3, f"in turns: {level == 'serialized'}")


def test_mpi_started_for_a_single_thread_is_refused(mpirun) -> None:
    job = mpirun(1, "mpi_threads.py", "single")
    assert job.returncode != 0
    assert "MPI was started for one thread only" in job.stderr


@pytest.mark.parametrize("ranks", some_of([1, 2, 3, 4], 3))
def test_transport_laws_hold_over_torch_distributed(forked, ranks: int) -> None:
    job = forked(ranks, "collectives_transports.py", "torch.distributed")
    assert_every_rank_prints(job, ranks, rf"{len(LAWS)} laws hold")


@pytest.mark.parametrize("ranks", some_of([1, 2, 3, 4], 3))
def test_reductions_under_mpirun_equal_those_in_threads(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "collectives_algorithms.py", "mpi")
    assert_every_rank_prints(job, ranks, "nothing is lost")


@pytest.mark.parametrize("ranks", some_of([2, 3], 3))
def test_reductions_over_torch_distributed_equal_those_in_threads(forked, ranks: int) -> None:
    job = forked(ranks, "collectives_algorithms.py", "torch.distributed")
    assert_every_rank_prints(job, ranks, "nothing is lost")


@pytest.mark.parametrize("ranks", some_of([2, 3, 4], 3))
def test_waits_for_missing_peers_end_under_mpirun(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "collectives_peers.py", "mpi")
    assert_every_rank_prints(job, ranks, "everyone was missed")
    assert_long_wait_was_announced(job, ranks)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
def test_waits_for_missing_peers_end_over_torch_distributed(forked, ranks: int) -> None:
    job = forked(ranks, "collectives_peers.py", "torch.distributed")
    assert_every_rank_prints(job, ranks, "everyone was missed")
    assert_long_wait_was_announced(job, ranks)


@pytest.mark.horovod
def test_horovod_transport_keeps_all_laws_under_mpirun(mpirun) -> None:
    job = mpirun(3, "collectives_transports.py", "horovod")
    assert_every_rank_prints(job, 3, rf"{len(LAWS)} laws hold")
    assert_every_rank_prints(
        mpirun(3, "collectives_algorithms.py", "horovod"), 3, "nothing is lost"
    )
    job = mpirun(3, "collectives_peers.py", "horovod")
    assert_every_rank_prints(job, 3, "everyone was missed")
    assert_long_wait_was_announced(job, 3)


@pytest.mark.horovod
def test_horovod_transport_keeps_the_laws_under_horovodrun_with_gloo(horovodrun) -> None:
    job = horovodrun(2, ["--gloo"], "collectives_transports.py", "horovod")
    assert_every_rank_prints(job, 2, rf"{len(LAWS)} laws hold")
