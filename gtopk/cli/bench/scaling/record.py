"""What the benchmark writes: one JSON object for each model and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from ....runtime.machine import Machine
from ..collectives.record import PerRank, Spread

SCHEMA: Final = 1


class Record(TypedDict):
    """One contender.

    seconds:         of a step on the slowest rank, over the rounds.
    efficiency:      the seconds of a step alone over the median: the share of the ranks' speed.
    cpu_share:       of the cores that all ranks have: what their processes took, in CPU seconds.
    interface_bytes: that a rank's network interface sent in a step; None where none was named.
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
    """The whole file, and what was run.

    emulated_compute: steps compute nothing: they take the published seconds asleep.
    scale:  of model and link: both are as many times smaller as those they stand for.
    bits_per_second, latency_seconds: of the link, measured before the steps.
    given_bits_per_second: what the link was set to; None: nobody said.
    cores:  that all ranks share; None: each host has its own.
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
    """Return what files of one or several runs hold; ValueError for what is not this program's."""
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    runs = content if isinstance(content, list) else [content]
    for run in runs:
        if not isinstance(run, dict) or run.get("benchmark") != "scaling":
            raise ValueError(f"{path} must be written by `gtopk bench scaling --json`")
        if run.get("schema") != SCHEMA:
            raise ValueError(f"{path} must have schema {SCHEMA}, got {run.get('schema')!r}")
    return cast("list[Results]", runs)
