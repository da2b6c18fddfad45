"""Training with parameters on a fake GPU, and on a real one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk import posing

KINDS = [
    Compression.none,
    Compression.topk(density=0.05),
    Compression.gtopk(density=0.05),
    Compression.gtopk(density=0.05, values="bf16"),
    Compression.gtopk(density=0.05, momentum_correction=0.9),
    Compression.gtopk(density=0.05, adam_correction=(0.9, 0.99)),
    Compression.oktopk(density=0.05),
    Compression.hierarchical(density=0.05),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
STEPS, RANKS = 8, 3


def network() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 5))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def train(
    transport: LocalTransport,
    compression: Any,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    during: Callable[[Any], None] = lambda optimizer: None,
) -> list[torch.Tensor]:
    """Return this rank's parameters after some steps of synthetic gradients, on the host."""
    model = network().to(device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(transport.rank)
    with world.entered(transport):
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
        )
        for _ in range(STEPS):
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.grad = drawn.to(device=device, dtype=dtype)
            optimizer.step()
            during(optimizer)
    return [parameter.detach().cpu() for parameter in model.parameters()]


def on_ranks(*arguments: Any, **options: Any) -> list[list[torch.Tensor]]:
    return run_ranks(local_world(RANKS, 60), lambda t: train(t, *arguments, **options))


def assert_equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> None:
    for replica, other_replica in zip(one, other, strict=True):
        for a, b in zip(replica, other_replica, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("compression", KINDS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_on_a_fake_gpu_is_bit_identical_to_the_host(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, compression: Any, dtype: torch.dtype
) -> None:
    expected = on_ranks(compression, dtype)
    posing.pose(monkeypatch, kernels)
    replicas = on_ranks(compression, dtype)
    assert_equal(replicas, expected)
    assert_equal(replicas[1:], replicas[:-1])  # all replicas


def test_only_selected_entries_are_copied_to_the_host(
    monkeypatch: pytest.MonkeyPatch, kernels: Any
) -> None:
    launched = posing.pose(monkeypatch, kernels)
    selected, updated = [], []

    def note(optimizer: Any) -> None:
        selected.append(optimizer.last_step.selected)
        updated.append(optimizer.last_step.updated)

    on_ranks(Compression.gtopk(density=0.05), during=note)
    entry_bytes = 4 + 4
    assert posing.moved["to the host"] == entry_bytes * sum(selected)
    returned = posing.moved["from the host"] - entry_bytes * sum(updated)
    assert 0 <= returned <= entry_bytes * sum(selected)
    names = {kernel.partition("<")[0] for kernel in launched()}
    assert names >= {"mark", "split", "clear_at", "add_at", "put_at"}


# ---- on a GPU


@pytest.fixture
def gpu() -> Any:
    """CuPy, if it and torch can use a GPU."""
    cupy = pytest.importorskip("cupy", reason="no cupy here")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("compression", KINDS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("gpu")
def test_training_on_a_gpu_matches_the_host(compression: Any, dtype: torch.dtype) -> None:
    expected = on_ranks(compression, dtype)
    replicas = on_ranks(compression, dtype, "cuda")
    assert_equal(replicas[1:], replicas[:-1])
    if compression != Compression.none and compression.adam_correction and dtype != torch.float64:
        return  # Adam's first steps are equally long, so rounding decides their order
    rounding = {} if dtype in (torch.float32, torch.float64) else {"rtol": 1e-2, "atol": 1e-2}
    for on_gpu, on_host in zip(replicas, expected, strict=True):
        for a, b in zip(on_gpu, on_host, strict=True):
            torch.testing.assert_close(a, b, **rounding)


@pytest.mark.gpu
def test_no_step_synchronizes_the_whole_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("torch"))
    real = gpu.cuda.runtime.deviceSynchronize
    monkeypatch.setattr(
        gpu.cuda.runtime, "deviceSynchronize", lambda: (waits.append("cupy"), real())
    )
    homes = set()
    on_ranks(
        Compression.gtopk(density=0.05),
        device="cuda",
        during=lambda optimizer: homes.add(
            type(optimizer._reducer.planned.bucket_exchanges[0].exchange.residual.values)
        ),
    )
    assert homes == {gpu.ndarray}
    assert waits == []


@pytest.mark.gpu
def test_step_is_ordered_between_backward_and_later_work_on_its_stream(gpu: Any) -> None:
    def rank(transport: LocalTransport, late: bool) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(100_000, device="cuda"))
        with world.entered(transport), torch.cuda.stream(torch.cuda.Stream()):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0),
                [("parameter", parameter)],
                Compression.gtopk(density=0.001),
            )
            for step in range(4):
                if late:
                    torch.cuda._sleep(20_000_000)  # unordered work would run first
                parameter.grad = torch.arange(100_000, device="cuda").float() * (step + 1)
                optimizer.step()
            return parameter.tolist()

    prompt, late = (
        run_ranks(local_world(2, 60), partial(rank, late=late)) for late in (False, True)
    )
    assert prompt == late
    assert np.any(prompt[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_ranks_open_a_context_on_their_own_gpu_only(mpirun: Any, transport: str) -> None:
    if (gpus := torch.cuda.device_count()) < 2:
        pytest.skip("needs two GPUs")
    job = mpirun(gpus, "own_gpu.py", GTOPK_TRANSPORT=transport)
    assert job.returncode == 0, job.stderr
