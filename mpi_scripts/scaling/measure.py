"""Measures the contenders in turn; a step's time is that of the slowest rank.

    alone | ssgd | ddp | ... | auto | alone      opened, warmed up, timed, closed: one in memory

All ranks exchange the last step's times before they start the next, so they also agree on when a
contender has used up its seconds. "alone" is measured first and last: it is the baseline of the
others' efficiency, and the machine's speed may change meanwhile.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from collectives.transports import Transport
from gtopk.cli.bench.collectives.run import interface_bytes
from gtopk.cli.bench.harness import PerRank, Spread, per_rank, spread
from gtopk.runtime.coordinator import Engine
from gtopk.runtime.machine import Machine

from .contenders import ALONE, CONTENDERS, Contender, Setting
from .models import PUBLISHED

SCHEMA: Final = 1


class Record(TypedDict):
    """One contender's results.

    seconds:         of a step on the slowest rank, for each round.
    efficiency:      the seconds of a step alone over the median of these.
    cpu_share:       the share of all ranks' cores that their processes used, in CPU seconds.
    interface_bytes: bytes that a rank's network interface sent in a step; None: none was named.
    published:       the paper's efficiency of this method on as many workers; None: not published.
    """

    contender: str
    ours: bool
    rounds: int
    seconds: Spread
    efficiency: float
    samples_per_second: float  # of all ranks
    cpu_share: float
    interface_bytes: PerRank | None
    published: float | None


class Results(TypedDict):
    """The content of a result file: the options of the run, and the records.

    emulated_compute: whether steps sleep for the published seconds instead of computing.
    scale:  factor by which model and link are smaller than those they stand for.
    bits_per_second, latency_seconds: of the link, measured before the steps.
    given_bits_per_second: the bandwidth that the link was set to; None: not given.
    cores:  number of cores that all ranks share; None: each host has its own.
    """

    schema: int
    benchmark: str
    machine: Machine
    command: str
    model: str
    emulated_compute: bool
    elements: int
    scale: float
    batch: int
    density: float
    ranks: int
    hosts: int
    transport: str
    library: str
    torch: str
    bits_per_second: float
    latency_seconds: float
    given_bits_per_second: float | None
    cores: int | None
    records: list[Record]


def read(path: Path) -> list[Results]:
    """Return the results in a file of one or more runs; raise ValueError for any other file."""
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    runs = content if isinstance(content, list) else [content]
    for run in runs:
        if not isinstance(run, dict) or run.get("benchmark") != "scaling":
            raise ValueError(f"{path} must be written by `python -m mpi_scripts.scaling --json`")
        if run.get("schema") != SCHEMA:
            raise ValueError(f"{path} must have schema {SCHEMA}, got {run.get('schema')!r}")
    return cast("list[Results]", runs)


@dataclass
class Timed:
    """The measurements of one contender's steps: lists by step, the bytes by rank."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all ranks together
    interface_bytes: list[float] = field(default_factory=list)


class Clock:
    """Times steps on all ranks; the times are exchanged by the engine.

    interface: the network interface whose sent bytes are recorded; None: none.
    """

    def __init__(self, engine: Engine, interface: str | None) -> None:
        self._engine = engine
        self._interface = interface

    def time(self, step: Callable[[], None]) -> list[list[float]]:
        """Take a step; return every rank's seconds, CPU seconds and sent bytes."""
        sent = interface_bytes(self._interface)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        step()
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
        own_times = [seconds, cpu_seconds, interface_bytes(self._interface) - sent]

        def work(transport: Transport, all_flags: list[int]) -> list[list[float]]:
            return transport.gather_object(own_times)

        times: list[list[float]] = self._engine.submit("bench.scaling", [], work).wait()
        return times


def measure(
    names: Sequence[str],
    setting: Setting,
    clock: Clock,
    rounds: int,
    budget_seconds: float,
    progress: Callable[[str], None],
) -> list[Timed]:
    """Return the measurements of every contender's steps; equal on all ranks.

    rounds: number of timed steps; fewer if budget_seconds run out before.
    """
    alone = Timed(CONTENDERS[ALONE])
    others = [Timed(CONTENDERS[name]) for name in names]
    for timed in (alone, *others, alone):
        progress(timed.contender.name)
        step = timed.contender.open(setting)
        for _ in range(timed.contender.warm_up):
            clock.time(step)
        last, used = len(timed.seconds) + rounds, 0.0
        while len(timed.seconds) < last and used < budget_seconds:
            times = clock.time(step)
            timed.seconds.append(max(seconds for seconds, _, _ in times))
            timed.cpu_seconds.append(sum(cpu for _, cpu, _ in times))
            timed.interface_bytes = [sent for _, _, sent in times]
            used += timed.seconds[-1]
        del step
        gc.collect()
    progress("")
    return [alone, *others]


def records(
    found: Sequence[Timed], setting: Setting, cores: int, with_interface: bool
) -> list[Record]:
    """Return the records of the measurements. cores: number of cores of all ranks together."""
    single = statistics.median(found[0].seconds)
    ranks, compute = setting.ranks, setting.compute
    published = PUBLISHED.get(compute.name) if compute.emulated else None
    return [
        Record(
            contender=timed.contender.name,
            ours=timed.contender.ours,
            rounds=len(timed.seconds),
            seconds=spread(timed.seconds),
            efficiency=single / statistics.median(timed.seconds),
            samples_per_second=ranks * compute.batch / statistics.median(timed.seconds),
            cpu_share=sum(timed.cpu_seconds) / (cores * sum(timed.seconds)),
            interface_bytes=per_rank(timed.interface_bytes) if with_interface else None,
            published=published.efficiency(timed.contender.name, ranks) if published else None,
        )
        for timed in found
    ]
