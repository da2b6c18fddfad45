"""Steps of several optimizers in turn, in one run: what each costs over the plain one.

plain                  the wrapped optimizer alone: nothing is exchanged
none, fp16, gtopk, auto      DistributedOptimizer with that compression
none-late, gtopk-late  the same, exchanged after backward
ddp, ddp-powersgd      DistributedDataParallel over gloo, and with PyTorch's PowerSGD hook
ddp-gtopk              the same with gtopk's hook
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ....compression import Compression
from ....ddp import GTopKState, gtopk_hook
from ....optim.distributed import DistributedOptimizer
from ....torch.functions import allgather_object
from ..progress import silent
from ..scaling.compute import Compute
from ..scaling.contenders import WHOLE_MODEL_MB, register_power

PLAIN: Final = "plain"
_ALONE: Final = (PLAIN, "none", "gtopk")

# From a model to what is called in its place, and what steps.
Way = Callable[[nn.Module], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Record:
    """Medians over the rounds.

    step_seconds:       of forward, backward and step.
    over_plain_seconds: of the differences to the plain step of the same round.
    quartiles:          of these, the lower and the upper.
    over_plain:         of the ratios to it, less 1.
    cpu_over_plain:     the same of the process's CPU time, all threads.
    working_seconds:    of the engine's thread in a step, selection and communication.
    hidden_share:       of these, what ran before `synchronize`, on the rank that came there last in
                        each step: those that wait for it hide less, and lose nothing by it. None
                        where there was nothing.
    buckets:            how many a step had.
    """

    name: str
    step_seconds: float
    over_plain_seconds: float
    quartiles: tuple[float, float]
    over_plain: float
    cpu_over_plain: float
    working_seconds: float
    hidden_share: float | None
    buckets: int


def ways(density: float, group: Any = None) -> dict[str, Way]:
    """Return every way by name; group: gloo's, for DDP."""
    gtopk = Compression.gtopk(density)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def ours(compression: Any, overlap: bool = True) -> Way:
        return lambda model: (
            model,
            DistributedOptimizer(
                plain(model), model.named_parameters(), compression, overlap=overlap
            ),
        )

    def ddp(hook: Callable[[Any, Any], None] | None = None, bucket_mb: float | None = None) -> Way:
        def open_ddp(model: nn.Module) -> tuple[nn.Module, Any]:
            replica = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
            if hook is not None:
                hook(replica, group)
            return replica, plain(model)

        return open_ddp

    def register_gtopk(model: DistributedDataParallel, _: Any) -> None:
        model.register_comm_hook(GTopKState(density), gtopk_hook)

    return {
        PLAIN: lambda model: (model, plain(model)),
        "none": ours(Compression.none),
        "fp16": ours(Compression.fp16),
        "gtopk": ours(gtopk),
        "auto": ours(Compression.auto(density=density)),
        "none-late": ours(Compression.none, overlap=False),
        "gtopk-late": ours(gtopk, overlap=False),
        "ddp": ddp(),
        "ddp-powersgd": ddp(register_power, WHOLE_MODEL_MB),
        "ddp-gtopk": ddp(register_gtopk),
    }


def usual(ranks: int) -> tuple[str, ...]:
    """Return what is compared unless said otherwise: alone there is nobody to talk to."""
    return _ALONE if ranks == 1 else (*_ALONE, "auto", "none-late", "gtopk-late", "ddp")


class Contender:
    """A model and what steps it."""

    def __init__(self, name: str, way: Way, compute: Compute) -> None:
        self.name = name
        self._compute = compute
        self.model, self.optimizer = way(compute.make())
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.working: list[float] = []
        self.hidden: list[float] = []

    def step(self, counts: bool) -> None:
        """Take a step, and note what it took where it counts."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        self._compute.backward(self.model)
        self.optimizer.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not counts:
            return
        self.wall.append(wall)
        self.cpu.append(cpu)
        if (report := getattr(self.optimizer, "last_step", None)) is not None:
            self.working.append(report.working_seconds)
            self.hidden.append(report.hidden_seconds)

    def record(self, plain: Contender) -> Record:
        """Return what was measured, beside the plain optimizer's steps; all ranks call it."""
        report = getattr(self.optimizer, "last_step", None)
        everyones = allgather_object([self.working, self.hidden])
        # By step: what the rank that had least to wait for after backward did, and hid.
        exposed = [
            min((w - h, w) for w, h in step)
            for step in zip(*(zip(*rank, strict=True) for rank in everyones), strict=True)
        ]
        working = sum(w for _, w in exposed)
        above = [mine - its for mine, its in zip(self.wall, plain.wall, strict=True)]
        first, _, third = statistics.quantiles(above, n=4) if len(above) > 1 else above * 3
        return Record(
            name=self.name,
            step_seconds=statistics.median(self.wall),
            over_plain_seconds=statistics.median(above),
            quartiles=(first, third),
            over_plain=_over(self.wall, plain.wall),
            cpu_over_plain=_over(self.cpu, plain.cpu),
            working_seconds=statistics.median(self.working) if self.working else 0.0,
            hidden_share=1.0 - sum(e for e, _ in exposed) / working if exposed else None,
            buckets=report.buckets if report is not None else 0,
        )


def _over(mine: list[float], plain: list[float]) -> float:
    return statistics.median(m / p for m, p in zip(mine, plain, strict=True)) - 1.0


def measure(
    compute: Compute,
    compared: Mapping[str, Way],
    rounds: int,
    progress: Callable[[str], None] = silent,
    warm_up: int = 3,
) -> list[Record]:
    """Return a record of every way; the first is what the others are compared with.

    Each round takes one step of every way, in an order that turns from round to round. All ranks
    begin a step together.
    """
    contenders = [Contender(name, way, compute) for name, way in compared.items()]
    for done in range(-warm_up, rounds):
        turn = done % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            allgather_object(None)
            contender.step(counts=done >= 0)
        progress(f"round {done + 1} of {rounds}" if done >= 0 else "warming up")
    progress("")
    return [contender.record(contenders[0]) for contender in contenders]
