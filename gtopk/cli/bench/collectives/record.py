"""What the benchmark writes: one JSON object, with a record for each contender of each case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final, TypedDict, cast

from ....runtime.machine import Machine

SCHEMA: Final = 1


class Spread(TypedDict):
    """Of one number over the rounds."""

    min: float
    lower_quartile: float
    median: float
    upper_quartile: float
    max: float


class PerRank(TypedDict):
    """Of one number over the ranks, per round."""

    mean: float
    max: float


class Link(TypedDict):
    """What the model takes the link to be, and where that comes from."""

    latency_seconds: float
    bits_per_second: float
    burst_bytes: float  # that pass at once after a pause
    bandwidth_from: str  # "measured", or "given"
    latency_from: str


class Record(TypedDict):
    """One contender in one case.

    modelled_link: seconds of latency, seconds per byte, and burst bytes, as these ranks measured or
                   were given them.
    modelled_wire_seconds: latency and bandwidth alone; None where there is no model.
    modelled_code_seconds: encode, decode, merge; where all ranks share cores, as many times longer
                           as there are ranks to a core, with the work on the others' messages.
    cpu_seconds: of a rank's process.
    measured_over_modelled: the median over modelled_wire_seconds.
    measured_over_wire_and_code: the median over both.
    interface_bytes: what the network interface says it sent, headers, acknowledgements and barriers
                     included; None where no interface was named.
    """

    contender: str
    label: str
    ours: bool
    reference: bool  # the one that ratios are told against: gtopk, as the model would send it
    selective: bool  # looks at the picks only; else its time holds for every density
    algorithm: str | None
    options: dict[str, Any]
    format: str | None
    ranks: int
    length: int
    density: float
    k: int
    distribution: str
    rounds: int
    seconds: Spread  # of the slowest rank
    seconds_by_round: list[float]
    cpu_seconds: PerRank
    sent_bytes: PerRank
    sent_messages: PerRank
    counted: bool  # message by message; else reckoned
    interface_bytes: PerRank | None
    updated: int  # coordinates that the update holds
    modelled_link: list[float]
    modelled_wire_seconds: float | None
    modelled_code_seconds: float | None
    measured_over_modelled: float | None
    measured_over_wire_and_code: float | None


class Run(TypedDict):
    """What was run."""

    command: str
    transport: str
    library: str
    ranks: int  # that were launched
    hosts: int
    link: Link  # of all that were launched
    calibration: str
    shared_cores: int | None  # of all ranks together, as given; None: as found
    seed: int


class Results(TypedDict):
    """The whole file."""

    schema: int
    benchmark: str
    machine: Machine
    run: Run
    records: list[Record]


def spread(seconds: Sequence[float]) -> Spread:
    """Return the spread of a contender's rounds."""
    if len(seconds) == 1:
        quartiles = [seconds[0]] * 3
    else:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(
        min=min(seconds),
        lower_quartile=quartiles[0],
        median=quartiles[1],
        upper_quartile=quartiles[2],
        max=max(seconds),
    )


def per_rank(numbers: Sequence[float]) -> PerRank:
    """Return the spread over the ranks."""
    return PerRank(mean=statistics.fmean(numbers), max=max(numbers))


def checked(results: Any, source: str) -> Results:
    """Return what was read from a file; raise ValueError for what is not this program's."""
    if not isinstance(results, dict) or results.get("benchmark") != "collectives":
        raise ValueError(f"{source} must be written by `gtopk bench collectives --json`")
    if results.get("schema") != SCHEMA:
        raise ValueError(
            f"{source} must have schema {SCHEMA}, got {results.get('schema')!r}: run it anew"
        )
    if not isinstance(results.get("records"), list) or not isinstance(results.get("run"), dict):
        raise ValueError(f"{source} lacks its records or what is told of its run")
    for record in results["records"]:
        if lacking := Record.__required_keys__ - record.keys():
            raise ValueError(f"a record of {source} lacks {', '.join(sorted(lacking))}")
    return cast("Results", results)
