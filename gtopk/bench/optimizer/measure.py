"""Steps of several optimizers in turn, in one run: what each costs over the plain one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...compression import Compression
from ...optimizer import DistributedOptimizer
from ...torch.functions import allgather_object
from ..progress import silent

PLAIN: Final = "plain"


@dataclass(frozen=True)
class Way:
    """A way to train.

    wrap: from the plain optimizer and the model's named parameters to what steps.
    """

    name: str
    wrap: Callable[[torch.optim.Optimizer, Any], Any]


@dataclass(frozen=True)
class Record:
    """Medians over the rounds.

    step_seconds:       of forward, backward and step.
    over_plain:         of the ratios to the plain step of the same round, less 1.
    cpu_over_plain:     the same of the process's CPU time, all threads.
    working_seconds:    of the engine's thread in a step, selection and communication.
    hidden_share:       of these, what ran before `synchronize`, on the rank that came there last in
                        each step: those that wait for it hide less, and lose nothing by it. None
                        where there was nothing.
    buckets:            how many a step had.
    """

    name: str
    step_seconds: float
    over_plain: float
    cpu_over_plain: float
    working_seconds: float
    hidden_share: float | None
    buckets: int


def ways(density: float, ranks: int) -> list[Way]:
    """Return what is compared; without overlap only where there is somebody to talk to."""
    gtopk = Compression.gtopk(density)
    found = [
        Way(PLAIN, lambda optimizer, named: optimizer),
        Way("dense", lambda o, named: DistributedOptimizer(o, named)),
        Way("gtopk", lambda o, named: DistributedOptimizer(o, named, gtopk)),
    ]
    if ranks > 1:
        found += [
            Way("dense, no overlap", lambda o, n: DistributedOptimizer(o, n, overlap=False)),
            Way("gtopk, no overlap", lambda o, n: DistributedOptimizer(o, n, gtopk, overlap=False)),
            Way("auto", lambda o, n: DistributedOptimizer(o, n, Compression.auto(density=density))),
        ]
    return found


class Contender:
    """A model and what steps it."""

    def __init__(self, way: Way, model: torch.nn.Module, batch: int, seed: int) -> None:
        self.way = way
        self.model = model
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = way.wrap(plain, list(model.named_parameters()))
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(batch, 3, 32, 32, generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.working: list[float] = []
        self.hidden: list[float] = []

    def step(self, counts: bool) -> None:
        """Take a step, and note what it took where it counts."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
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
        return Record(
            name=self.way.name,
            step_seconds=statistics.median(self.wall),
            over_plain=_over(self.wall, plain.wall),
            cpu_over_plain=_over(self.cpu, plain.cpu),
            working_seconds=statistics.median(self.working) if self.working else 0.0,
            hidden_share=1.0 - sum(e for e, _ in exposed) / working if exposed else None,
            buckets=report.buckets if report is not None else 0,
        )


def _over(mine: list[float], plain: list[float]) -> float:
    return statistics.median(m / p for m, p in zip(mine, plain, strict=True)) - 1.0


def measure(
    make: Callable[[], torch.nn.Module],
    compared: list[Way],
    batch: int,
    rounds: int,
    rank: int,
    progress: Callable[[str], None] = silent,
    warm_up: int = 3,
) -> list[Record]:
    """Return a record of every way; the first is what the others are compared with.

    Each round takes one step of every way, in an order that turns from round to round.
    """
    contenders = []
    for way in compared:
        torch.manual_seed(0)
        contenders.append(Contender(way, make(), batch, seed=rank))
    for done in range(-warm_up, rounds):
        turn = done % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            contender.step(counts=done >= 0)
        progress(f"round {done + 1} of {rounds}" if done >= 0 else "warming up")
    progress("")
    return [contender.record(contenders[0]) for contender in contenders]
