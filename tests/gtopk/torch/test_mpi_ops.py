"""Horovod's collectives, on real ranks and in a single process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gtopk.torch as hvd
from tests.matrix import some_of


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    some_of(
        [("mpirun", 1), ("mpirun", 2), ("mpirun", 3), ("forked", 2), ("forked", 3)],
        ("mpirun", 3),
    ),
)
def test_every_collective_gives_the_expected_result_on_real_ranks(
    request, tmp_path, launcher: str, ranks: int
) -> None:
    job = request.getfixturevalue(launcher)(ranks, "mpi_ops.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every collective does as it says") == ranks, job.stdout


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    some_of([("mpirun", 2), ("forked", 3)], ("forked", 3)),
)
def test_every_collective_on_device_tensors_gives_the_expected_result(
    request, tmp_path, launcher: str, ranks: int
) -> None:
    # As on GPUs over NCCL; gloo replaces it.
    job = request.getfixturevalue(launcher)(ranks, "mpi_ops_of_gpus.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every collective does as it says\n") == ranks, job.stdout
    assert job.stdout.count("as on GPUs") == ranks, job.stdout


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a world of one rank, like a script without mpirun."""
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
def test_process_without_mpirun_is_a_world_of_one() -> None:
    assert (hvd.rank(), hvd.size()) == (0, 1)
    assert (hvd.local_rank(), hvd.local_size()) == (0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.mpi_enabled() is False
    hvd.barrier()
    tensor = torch.tensor([1.5, -2.5])
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        assert torch.equal(hvd.allreduce(tensor, op=op), tensor)
    assert torch.equal(hvd.allgather(tensor), tensor)
    assert torch.equal(hvd.broadcast(tensor, 0), tensor)


@pytest.mark.timeout(30)
def test_step_after_shutdown_raises() -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    hvd.shutdown()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises((ValueError, hvd.HorovodInternalError), match=r"shut down|initialized"):
        optimizer.step()


def test_init_takes_only_communicators_and_lists_of_valid_ranks() -> None:
    for comm in ("world", 1, [0.5]):
        with pytest.raises(ValueError, match="mpi4py communicator, a list of ranks or None"):
            hvd.init(comm)
    for comm in ([0, 1], [1], [0, 0]):
        with pytest.raises(ValueError, match=r"distinct ranks of 0\.\.0"):
            hvd.init(comm)
    assert not hvd.is_initialized()
    for comm in ([0], []):
        hvd.init(comm)
        assert hvd.size() == 1
        hvd.shutdown()
