"""gtopk.accelerate: a loop with the real Accelerate, if installed, and tests with a fake."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from collectives.transports import LocalTransport
from gtopk.accelerate import compress
from gtopk.runtime.world import world


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="Accelerate is not installed: make test-adapters",
)
def test_accelerate_loop_exchanges_by_gtopk(torchrun: Any, tmp_path: Any) -> None:
    job = torchrun(2, "accelerate_loop.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("Accelerate uses gTop-k") == 2


@pytest.fixture
def process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def accelerator() -> Any:
    """Return a fake Accelerator for `compress`; it keeps registered objects."""
    registered: list[Any] = []
    return SimpleNamespace(
        scaler=None,
        num_processes=1,
        distributed_type="MULTI_CPU",
        registered=registered,
        register_for_checkpointing=registered.append,
    )


@pytest.mark.usefixtures("process_group")
def test_compiled_ddp_model_is_compressed_and_its_residual_saved(threads: Any) -> None:
    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            fake, inner = accelerator(), torch.nn.Linear(4, 3)
            model: Any = torch.compile(DistributedDataParallel(inner), backend="eager")
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
            prepared = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)
            state = compress(fake, model, prepared, density=0.2)
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            assert state.progress.steps == 1
            (held,) = fake.registered[0].state_dict()["held"].values()
            assert held.keys() == {"weight", "bias"}
            assert any(bool(parts["residual"].any()) for parts in held.values())

    threads(1, program)


def test_compress_refuses_what_is_no_accelerator() -> None:
    model = torch.nn.Linear(4, 3)
    for no_accelerator in (None, model):
        with pytest.raises(
            TypeError, match=r"compress\(accelerator, model, optimizer\) got .* first"
        ):
            compress(no_accelerator, model, [])


def test_model_not_wrapped_in_ddp_raises_with_its_class() -> None:
    model = torch.nn.Linear(4, 3)
    for each in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="in DistributedDataParallel, got Linear on 1 process"):
            compress(accelerator(), each, [])  # type: ignore[arg-type]
