"""Results in the format of a run, made up without one."""

from __future__ import annotations

import pytest

from gtopk.cli.bench.harness import per_rank, spread
from gtopk.runtime.machine import this_machine
from mpi_scripts.scaling.measure import SCHEMA, Record, Results
from mpi_scripts.scaling.models import PUBLISHED

STEPS = {"alone": 0.1, "ssgd": 1.0, "ddp": 0.8, "gtopk-tree": 0.2, "gtopk": 0.125}


def results_of(ranks: int, *, emulated: bool = True) -> Results:
    """Return results whose steps take STEPS."""
    published = PUBLISHED["vgg16"]
    records = [
        Record(
            contender=name,
            ours=name.startswith("gtopk"),
            rounds=2,
            seconds=spread([seconds, seconds]),
            efficiency=STEPS["alone"] / seconds,
            samples_per_second=ranks * 128 / seconds,
            cpu_share=0.25,
            interface_bytes=per_rank([1e6] * ranks) if name != "alone" else None,
            published=published.efficiency(name, ranks) if emulated else None,
        )
        for name, seconds in STEPS.items()
    ]
    return Results(
        schema=SCHEMA,
        benchmark="scaling",
        machine={**this_machine(), "load_after": 1.0},
        command="python -m mpi_scripts.scaling",
        model="vgg16",
        emulated_compute=emulated,
        elements=1_472_826,
        scale=10.0,
        batch=128,
        density=0.001,
        ranks=ranks,
        hosts=ranks,
        transport="mpi",
        library="some MPI",
        torch="2",
        bits_per_second=9.4e7,
        latency_seconds=1e-4,
        given_bits_per_second=1e8,
        cores=2,
        records=records,
    )


@pytest.fixture
def runs() -> list[Results]:
    return [results_of(8), results_of(4)]
