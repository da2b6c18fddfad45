"""Messages of GPUs on real ones: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import open_transport
from collectives.transports import local_world
from collectives.transports.cuda_aware import why_staged
from collectives.transports.direct import DirectTransport
from collectives.transports.staged import StagedTransport
from tests.programs import collectives_transports as laws
from tests.programs import of_gpus


def gpus() -> int:
    """Return how many GPUs CuPy can use here."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError):
        return 0


GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU, and CuPy")]


LAWS = of_gpus.without_counts(laws.LAWS)


@pytest.mark.parametrize("name", ["nccl", "staged"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("test_"))
def test_one_rank_is_a_world(law: Callable[..., None], name: str) -> None:
    transport = open_transport(name, bootstrap=local_world(1, 60)[0], timeout_seconds=60)
    law(of_gpus.OfGpus(transport))
    transport.leave("done")


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 24])
def test_a_rank_sends_to_itself_over_nccl(size: int) -> None:
    transport = open_transport("nccl", bootstrap=local_world(1, 60)[0], timeout_seconds=60)
    assert transport.library().startswith("NCCL 2.")
    sent = laws.message(size, 1)
    assert transport.exchange(of_gpus.up(sent), 0).get().tobytes() == sent.tobytes()
    channel = transport.channel(3)
    channel.connect()
    assert channel.exchange(of_gpus.up(sent), 0).get().tobytes() == sent.tobytes()
    transport.leave("done")


def test_a_message_is_sent_as_the_callers_stream_makes_it() -> None:
    import cupy

    transport = open_transport("nccl", bootstrap=local_world(1, 60)[0], timeout_seconds=60)
    with cupy.cuda.Stream(non_blocking=True):
        for turn in range(20):
            numbers = cupy.arange(1 << 22, dtype=cupy.uint64)
            for _ in range(20):
                numbers = numbers * np.uint64(3) + np.uint64(turn)
            received = transport.exchange(numbers.view(cupy.uint8), 0)
            assert bool((received.view(cupy.uint64) == numbers).all())
    transport.leave("done")


def test_a_try_tells_whether_mpi_takes_gpu_memory_and_what_is_opened_keeps_the_laws() -> None:
    pytest.importorskip("mpi4py")
    reason = why_staged()
    transport = open_transport("mpi", timeout_seconds=60)
    assert isinstance(transport, DirectTransport) == (not reason)
    assert isinstance(transport, StagedTransport)
    for law in LAWS:
        law(of_gpus.OfGpus(transport))
    transport.leave("done")


@pytest.mark.parametrize("ranks", [GPUS + 1, GPUS + 3])
def test_messages_of_gpus_go_over_mpi_itself(mpirun: Any, ranks: int) -> None:
    check(mpirun(ranks, "collectives_gpus.py", "mpi"), ranks)


def check(job: Any, ranks: int) -> None:
    assert job.returncode == 0, job.stderr
    said = [line for line in job.stdout.splitlines() if line.startswith("rank")]
    assert sorted(said) == [f"rank {r} of {ranks}: {len(LAWS)} laws hold" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [GPUS + 1, GPUS + 3])
def test_ranks_that_share_a_gpu_stage_through_pinned_memory(mpirun: Any, ranks: int) -> None:
    check(mpirun(ranks, "collectives_gpus.py", "staged"), ranks)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ranks_with_a_gpu_each_send_over_nccl(mpirun: Any) -> None:
    check(mpirun(min(GPUS, 8), "collectives_gpus.py", "nccl"), min(GPUS, 8))
