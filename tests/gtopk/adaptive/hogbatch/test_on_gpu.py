"""Ranks on a GPU (class "gpu") and ranks on the CPU train one model, as threads or processes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from gtopk.adaptive.hogbatch.shared_model import DeviceCopy, SharedModel, layout_of, states_of
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.hogbatch_workers import (
    BATCH,
    data,
    flat,
    loss_of,
    record,
    take_alone,
    train,
)
from tests.gtopk.adaptive.modelled_ranks import network, on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
LENGTH = 203
GPU = "cuda"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused adam": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
}


def adapted(device: str, make: Any, mode: str = "hogbatch", **options: Any) -> Any:
    model = network().to(device)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    options = {"sizes": {"cpu": 4, "gpu": 16}, **options}
    loader = hvd.adapt(DataLoader(data(), BATCH, shuffle=True), optimizer, mode, **options)
    return loader, model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lock_step_of_gpu_and_cpu_ranks_equals_single_process(name: str) -> None:
    size, steps = 3, []

    def program(here: World) -> torch.Tensor:
        device = GPU if here.rank == 0 else "cpu"
        loader, model, optimizer = adapted(device, OPTIMIZERS[name], lock_step=True)
        record(loader, steps)
        for _ in range(2):
            train(loader, model, optimizer)
        assert [w.device_class for w in loader.report().workers] == ["gpu", "cpu", "cpu"]
        loader.drain()
        assert {p.device.type for p in model.parameters()} == {torch.device(device).type}
        return flat(model)

    results = on_ranks(size, program)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    take_alone(model, optimizer, steps, size)
    for parameters in results:
        torch.testing.assert_close(parameters, flat(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["hogbatch", "adaptive-hogbatch"])
@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_ranks_that_share_a_gpu_train_one_model(mode: str, gpus: int) -> None:
    """With three ranks; batch sizes come from probing, and from the available memory."""

    def program(here: World) -> Any:
        device = GPU if here.rank < gpus else "cpu"
        make = OPTIMIZERS["adam"]
        loader, model, optimizer = adapted(device, make, mode, sizes=None, audit=True)
        seen = [list(chain.from_iterable(train(loader, model, optimizer))) for _ in range(3)]
        lost, report = loader.audited(), loader.report()
        assert 0 <= lost <= report.overlapped_share + 1e-12
        calls = []

        def mean_loss(batch: Any) -> torch.Tensor:
            calls.append(len(batch[0]))
            return loss_of(model, *batch[1:])

        loss = loader.evaluate(mean_loss, batch=50)
        loader.drain()
        assert loss == pytest.approx(loss_of(model, *data()[:][1:]).item(), rel=1e-9)
        assert bool(calls) <= (here.rank < gpus)  # only the fast class computes it
        for state in optimizer.state.values():
            assert {tensor.device.type for tensor in state.values()} == {"cpu"}
            assert (state["exp_avg_sq"] >= 0).all()
        return seen, flat(model), report

    results = on_ranks(3, program)
    for epoch in range(3):
        assert sorted(i for seen, *_ in results for i in seen[epoch]) == list(range(LENGTH))
    assert all(torch.equal(parameters, results[0][1]) for _, parameters, _ in results)
    workers = results[0][2].workers
    assert [w.device_class for w in workers] == ["gpu"] * gpus + ["cpu"] * (3 - gpus)
    assert sum(worker.samples for worker in workers) == 3 * LENGTH


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stale_gpu_gradient_steps_like_plain_optimizer_on_host(name: str) -> None:
    plain, slow, fast = network(), network(), network().to(GPU)
    oracle, in_place, beside = (OPTIMIZERS[name](m.parameters()) for m in (plain, slow, fast))
    parameters, own = list(slow.parameters()), list(fast.parameters())
    states = states_of(beside, own)
    layout = layout_of(own, states)
    assert layout == layout_of(parameters, states_of(in_place, parameters))
    shared = SharedModel(np.zeros(layout.size_bytes, np.uint8), layout)
    shared.fill(own, states)
    shared.map_state(parameters, [dict(state) for state in states], in_place)
    shared.map_parameters(parameters)
    shared.map_state(own, states, beside)
    copy = DeviceCopy(shared, own)
    copy.refresh()
    places = [parameter.data_ptr() for parameter in own]
    for _ in range(600):
        for optimizer, trained in ((oracle, plain), (in_place, slow)):
            for parameter in trained.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
    for parameter, other in zip(own, plain.parameters(), strict=True):
        parameter.grad, other.grad = torch.ones_like(parameter), torch.ones_like(other)
    gradients = [parameter.grad for parameter in own]
    with copy.on_shared_memory():
        assert {parameter.device.type for parameter in own} == {"cpu"}
        beside.step()
    oracle.step()
    for shared_one, expected in zip(shared.parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(shared_one, expected.detach(), rtol=1e-12, atol=1e-14)
    assert [parameter.data_ptr() for parameter in own] == places
    assert all(p.grad is g and p.is_cuda for p, g in zip(own, gradients, strict=True))
    loss_of(fast, *data()[:][1:]).backward()  # gradients are still created there
    assert all(parameter.grad.is_cuda for parameter in own)


@pytest.mark.parametrize("ranks_on_gpu", [1, 2])
def test_gpu_and_cpu_processes_train_one_model(
    mpirun: Callable[..., Any], ranks_on_gpu: int
) -> None:
    job = mpirun(3, "hogbatch_gpu.py", timeout=50, HOGBATCH_GPUS=str(ranks_on_gpu))
    assert job.returncode == 0, job.stderr
