"""Messages of GPUs on real ones: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Transport, open_transport
from collectives.transports import gpu, local_world
from collectives.transports.device_choice import GpuFacts, GpuRoute
from collectives.transports.direct import DirectTransport, why_staged
from collectives.transports.gpu import name_of_device, torch_nccl
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import StagedTransport
from tests.programs import collectives_transports as laws
from tests.programs import of_gpus


def count_gpus() -> int:
    """Return how many GPUs CuPy can use here."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError):
        return 0


GPUS = count_gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU, and CuPy")]


LAWS = of_gpus.without_counts(laws.LAWS)


@pytest.mark.parametrize("name", ["nccl", "staged"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("test_"))
def test_single_rank_keeps_the_transport_laws_on_a_gpu(law: Callable[..., None], name: str) -> None:
    transport = open_transport(name, bootstrap=local_world(1, 60)[0], timeout_seconds=60)
    law(of_gpus.OfGpus(transport))
    transport.leave("done")


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 24])
def test_rank_sends_to_itself_over_nccl(size: int) -> None:
    transport = open_transport("nccl", bootstrap=local_world(1, 60)[0], timeout_seconds=60)
    assert transport.library().startswith("NCCL 2.")
    sent = laws.message(size, 1)
    assert transport.exchange(of_gpus.up(sent), 0).get().tobytes() == sent.tobytes()
    channel = transport.channel(3)
    channel.connect()
    assert channel.exchange(of_gpus.up(sent), 0).get().tobytes() == sent.tobytes()
    transport.leave("done")


def test_message_is_sent_after_the_callers_stream_wrote_it() -> None:
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


def test_mpi_transport_follows_the_cuda_trial_and_keeps_the_laws() -> None:
    pytest.importorskip("mpi4py")
    reason = why_staged()
    transport = open_transport("mpi", timeout_seconds=60)
    assert isinstance(transport, DirectTransport) == (not reason)
    assert isinstance(transport, StagedTransport)
    for law in LAWS:
        law(of_gpus.OfGpus(transport))
    transport.leave("done")


@pytest.mark.parametrize("ranks", [GPUS + 1, GPUS + 3])
def test_gpu_messages_keep_the_laws_over_mpi(mpirun: Any, ranks: int) -> None:
    assert_laws_hold(mpirun(ranks, "collectives_gpus.py", "mpi"), ranks)


def assert_laws_hold(job: Any, ranks: int) -> None:
    assert job.returncode == 0, job.stderr
    lines = [line for line in job.stdout.splitlines() if line.startswith("rank")]
    assert sorted(lines) == [f"rank {r} of {ranks}: {len(LAWS)} laws hold" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [GPUS + 1, GPUS + 3])
def test_gpu_messages_keep_the_laws_staged_through_pinned_memory(mpirun: Any, ranks: int) -> None:
    assert_laws_hold(mpirun(ranks, "collectives_gpus.py", "staged"), ranks)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ranks_with_own_gpus_keep_the_laws_over_nccl(mpirun: Any) -> None:
    assert_laws_hold(mpirun(min(GPUS, 8), "collectives_gpus.py", "nccl"), min(GPUS, 8))


# ---- NCCL by default, and torch's


def test_nccl_connects_at_the_first_gpu_array() -> None:
    transport = NcclTransport(local_world(1, 60)[0], timeout_seconds=60, automatic=True)
    assert transport.choice is None
    array = of_gpus.up(np.arange(5.0))
    transport.allreduce(array)
    assert array.get().tolist() == list(range(5))
    assert transport.choice is not None
    assert transport.choice.route is GpuRoute.NCCL
    assert transport.sends_from_device
    transport.leave("done")


@pytest.mark.parametrize("through", ["CuPy", "torch"])
def test_gpu_tensors_stay_on_the_gpu_in_every_dense_collective(
    through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        pytest.skip("needs a torch with CUDA and NCCL")
    if through == "torch":

        def facts(host: Transport, device: int | None) -> GpuFacts:
            return GpuFacts("this GPU", cupy="it is not to be used", torch_nccl=torch_nccl())

        monkeypatch.setattr(gpu, "own_gpu_facts", facts)
    transport = NcclTransport(local_world(1, 60)[0], timeout_seconds=60, automatic=True)
    transport.connect(0)
    collectives = transport._collectives
    assert type(collectives).__name__ == f"{'Torch' if through == 'torch' else 'Cupy'}Collectives"
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.arange(1 << 20, device="cuda:0").remainder(100).to(dtype)
            expected = tensor.clone()
            assert transport.carries(tensor)
            collectives.allreduce(tensor, "sum")
            collectives.reduce_scatter(tensor, [0, tensor.numel()], "max")
            collectives.allgather_into(tensor, [0, tensor.numel()])
            collectives.broadcast_into(tensor, 0)
            received, ends = transport.alltoall(tensor, [0, tensor.numel()])
            assert ends == [0, tensor.numel()]
            assert torch.equal(tensor, expected)
            assert torch.equal(received, expected)
    transport.leave("done")


def test_device_name_identifies_one_gpu() -> None:
    name = name_of_device(0, 0)
    assert name.startswith("GPU-") or "on the host of rank 0" in name
