"""Whole training steps of one rank: plain SGD, and the same step through gtopk and through DDP.

A model has the parameters' shapes of its namesake and almost no forward pass, so that
a step's time beyond plain SGD's is the cost of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from common import Clock, device_name, init_group_of_one, record, synchronize, wall_clock
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gtopk
import gtopk.torch as hvd
from models.resnet_imagenet import resnet50

DENSITY = 0.001
POWERSGD_RANK = 4
WARM = 8  # PowerSGD begins in its third step, DDP makes its buckets anew after the first

Shapes = list[tuple[int, ...]]


def _resnet50() -> Shapes:
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in resnet50().parameters()]


def _small(shapes: Shapes) -> Shapes:
    """Return the shapes with each side cut to at most 8."""
    return [tuple(min(side, 8) for side in shape) for shape in shapes]


MODELS: dict[str, Callable[[], Shapes]] = {
    "flat": lambda: [(25_600, 1000)],
    "ResNet-50": _resnet50,
}


class OfShapes(torch.nn.Module):
    """A model that multiplies each parameter with its own numbers and sums all products."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        super().__init__()
        self.list = torch.nn.ParameterList(torch.zeros(shape, device=device) for shape in shapes)

    def forward(self, drawn: list[torch.Tensor]) -> torch.Tensor:
        terms = [(p * x).sum() for p, x in zip(self.list, drawn, strict=True)]
        return torch.stack(terms).sum()


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Run as the single rank of a process group and of gtopk."""
    init_group_of_one(device)
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        torch.distributed.destroy_process_group()


def kinds_of_steps(shapes: Shapes, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each kind of step, by name; each has its own model."""
    drawn = [torch.randn(shape, device=device) for shape in shapes]

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model(drawn).backward()
            optimizer.step()

        return step

    model = OfShapes(shapes, device)
    yield "plain SGD", step_of(model, sgd(model))
    for name, compression in (
        ("DistributedOptimizer, dense", hvd.Compression.none),
        ("DistributedOptimizer, gtopk", hvd.Compression.gtopk(density=DENSITY)),
    ):
        model = OfShapes(shapes, device)
        named = [(f"{name}.{which}", p) for which, p in model.named_parameters()]
        yield name, step_of(model, hvd.DistributedOptimizer(sgd(model), named, compression))
    powersgd = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=2)
    for name, hook in (
        ("DDP", None),
        (f"DDP, PowerSGD rank {POWERSGD_RANK}", (powersgd, powerSGD_hook.powerSGD_hook)),
        ("DDP, gtopk", (gtopk.ddp.GTopKState(density=DENSITY), gtopk.ddp.gtopk_hook)),
    ):
        model = OfShapes(shapes, device)
        ddp = DistributedDataParallel(model)
        if hook is not None:
            ddp.register_comm_hook(*hook)
        yield name, step_of(ddp, sgd(model))


def whole_steps(name: str, device: str) -> None:
    """Time every kind of step of a model of these shapes."""
    shapes = MODELS[name]()
    shapes = _small(shapes) if device == "cpu" else shapes
    clock, plain = Clock(device), None
    with process_group(device):
        for way, step in kinds_of_steps(shapes, device):
            wall = wall_clock(step, device, warm=WARM)
            plain = plain or wall["median_us"]
            record(
                "whole step",
                model=name,
                way=way,
                device=device_name(device),
                n=sum(torch.Size(shape).numel() for shape in shapes),
                parameters=len(shapes),
                beyond_plain_us=round(wall["median_us"] - plain, 1),
                wall=wall,
                by_events=clock(step),
                **launches(step, device),
            )


def launches(step: Callable[[], None], device: str) -> dict[str, object]:
    """Return how many kernels a step launches, and how often the host waits, by the profiler."""
    if device == "cpu":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        synchronize(device)
    events = seen.events()
    on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
    calls = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "StreamSynchronize", "EventSynchronize")
    return {
        "kernels": len(on_device),
        "device_us": round(sum(event.device_time for event in on_device)),
        "calls": {call: sum(call in event.name for event in events) for call in calls},
    }
