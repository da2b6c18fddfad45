"""Run under torchrun on 2 ranks or 4: each way to train logs its advice and predicts its exchange.

With the argument "off" the last rank wants no advice, and no rank predicts anything. Each model has
another number of values, so that a line shows which one it is about. For the last ways there is no
prediction.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gtopk
import gtopk.torch as hvd
from gtopk import fsdp
from gtopk.ddp import GTopKState, gtopk_hook
from gtopk.runtime.world import world
from gtopk.telemetry.step_report import StepReport

torch.distributed.init_process_group("gloo")
hvd.init()
WANTED = sys.argv[1:] != ["off"]
if not WANTED and hvd.rank() == hvd.size() - 1:
    os.environ["GTOPK_ADVICE"] = "off"
STEPS, GTOPK = 4, hvd.Compression.gtopk(density=0.01)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: int) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, values)).square().mean().backward()
        optimizer.step()


def distributed(model: torch.nn.Module) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), GTOPK)


def by_optimizer(model: torch.nn.Module, values: int) -> StepReport | None:
    optimizer = distributed(model)
    train(model, optimizer, values)
    return optimizer.last_step


def by_ddp(model: torch.nn.Module, values: int) -> StepReport | None:
    state, parallel = GTopKState(density=0.01), DistributedDataParallel(model)
    parallel.register_comm_hook(state, gtopk_hook)
    train(parallel, sgd(model), values)
    return state.last_step


def by_fsdp(model: torch.nn.Module, values: int) -> StepReport | None:
    shape = (2, hvd.size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    state = fsdp.replicate(model, mesh["replicate"], 0.01)
    train(model, sgd(model), values)
    return state.last_step


def by_local_sgd(model: torch.nn.Module, values: int) -> StepReport | None:
    optimizer = gtopk.LocalSGD(sgd(model), inner_steps=2, compression=GTOPK)
    train(model, optimizer, values)
    return optimizer.last_step


def by_adasum(model: torch.nn.Module, values: int) -> StepReport | None:
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Adasum)
    train(model, optimizer, values)
    return optimizer.last_step


def by_adapt(mode: str, **options: object) -> Callable[[torch.nn.Module, int], StepReport | None]:
    def adapted(model: torch.nn.Module, values: int) -> StepReport | None:
        optimizer = distributed(model)
        samples = TensorDataset(torch.randn(64, values))
        loader = hvd.adapt(DataLoader(samples, 16), optimizer, mode, **options)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return optimizer.last_step

    return adapted


HALVES = [[*range(hvd.size() // 2)], [*range(hvd.size() // 2, hvd.size())]]
PREDICTED = [by_optimizer, by_ddp, by_fsdp, by_local_sgd, by_adapt("abs"), by_adapt("adaptive-sgd")]
OTHERS = [
    by_adasum,
    by_adapt("hogbatch"),
    by_adapt("adaptive-hogbatch"),
    by_adapt("hogbatch", nodes=HALVES),
]
for values, way in enumerate([*PREDICTED, *OTHERS], start=501):
    world.current().advised = False
    torch.manual_seed(0)
    report = way(torch.nn.Linear(values, 2, bias=False), values)
    assert report is not None
    assert (report.predicted_seconds is not None) == (WANTED and way in PREDICTED), way
    assert (report.predicted_seconds or 1.0) > 0, way
print("every way, as it says\n", end="", flush=True)
