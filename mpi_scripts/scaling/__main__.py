"""Time training steps with every method, on all ranks of a launcher or on one.

mpirun -n 4 python -m mpi_scripts.scaling --model vgg16 --json scaling.json      in a checkout
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from collectives.cores import usable_cores
from collectives.cost_model.calibration import measure_network
from collectives.transports import Transport
from gtopk.cli.arguments import above_zero, as_argument, number_in, output_file, share
from gtopk.cli.bench.collectives.library import open_library
from gtopk.cli.bench.collectives.run import count_hosts
from gtopk.cli.bench.harness import NETWORKS, add_words, one_of, real, show_progress, silent
from gtopk.cli.bench.optimizer import open_gloo
from gtopk.runtime.machine import load, this_machine
from gtopk.runtime.world import world

from . import measure as record
from .contenders import ALONE, CONTENDERS, Setting
from .measure import Clock, Results, measure, read, records
from .models import PUBLISHED, Compute, emulated
from .report import markdown, table


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="python -m mpi_scripts.scaling",
        description="Time training steps with every method, and a single worker's for comparison: "
        "start it on the ranks to measure (mpirun -n 4 python -m mpi_scripts.scaling).",
        epilog="example:\n  mpirun -n 4 python -m mpi_scripts.scaling --json scaling.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = described.add_argument
    add(
        "--model",
        choices=list({**PUBLISHED, **NETWORKS}),  # some are in both
        default="vgg16",
        help="default: %(default)s. With --compute paper one of "
        f"{', '.join(PUBLISHED)}; with --compute real one of {', '.join(NETWORKS)}",
    )
    add(
        "--compute",
        choices=["paper", "real"],
        default="paper",
        help="paper: emulate a step's computation, at the speed of the published workers; real: "
        "compute it; default: %(default)s",
    )
    add(
        "--scale",
        type=as_argument(number_in("[1, inf)")),
        default=1.0,
        help="shrink an emulated model by this factor",
    )
    add("--batch", type=int, default=32, help="per rank, with --compute real")
    add("--density", type=as_argument(share), default=0.001, help="default: %(default)s")
    others = [name for name in CONTENDERS if name != ALONE]
    choices = f"of {', '.join(others)}; default: all"
    add_words(described, "--contenders", one_of(others), others, help=choices)
    add("--rounds", type=int, default=5, help="timed steps; default: %(default)s")
    add(
        "--budget-seconds",
        type=as_argument(above_zero),
        default=20.0,
        help="limit per contender; default: %(default)s",
    )
    add(
        "--bandwidth",
        type=as_argument(above_zero),
        help="bits per second that the link is set to, for the record",
    )
    add(
        "--shared-cores",
        type=int,
        help="cores of all ranks together, if one machine emulates hosts",
    )
    add("--interface", help="network interface whose sent bytes to record, such as eth0")
    add("--json", type=as_argument(output_file), help="file to write")
    printed = "measure nothing, print these JSON files' tables"
    add_words(described, "--markdown", Path, metavar="FILE", help=printed)
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        if options.markdown:
            print(markdown([run for path in options.markdown for run in read(path)]))
            return 0
        check(options)
    except (OSError, ValueError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    world.init()
    results = run(options, shlex.join(["python", "-m", "mpi_scripts.scaling", *given]))
    if world.current().rank == 0:
        print(table(results), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    world.shutdown()
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be measured."""
    models = PUBLISHED if options.compute == "paper" else NETWORKS
    if options.model not in models:
        raise ValueError(
            f"--compute {options.compute} supports {', '.join(models)}; got --model {options.model}"
        )
    for name in ("rounds", "batch", "shared_cores"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def run(options: argparse.Namespace, command: str) -> Results:
    """Return the results; all ranks call it, and all get them."""
    here, machine = world.current(), this_machine()
    facts = here.engine.submit("bench.network", [], _measure_link).wait()
    compute = (
        emulated(options.model, options.scale, here.rank)
        if options.compute == "paper"
        else Compute(
            options.model,
            False,
            1.0,
            options.batch,
            *real(options.model, options.batch, here.rank),
        )
    )
    library = open_library(here.transport, range(here.size))
    group = open_gloo()
    setting = Setting(compute, options.density, here.size, library, group)
    found = measure(
        options.contenders,
        setting,
        Clock(here.engine, options.interface),
        options.rounds,
        options.budget_seconds,
        show_progress if here.rank == 0 else silent,
    )
    machine["load_after"] = load()
    cores = options.shared_cores or here.size * usable_cores()
    return Results(
        schema=record.SCHEMA,
        benchmark="scaling",
        machine=machine,
        command=command,
        model=options.model,
        emulated_compute=compute.emulated,
        elements=sum(p.numel() for p in compute.make().parameters()),
        scale=compute.scale,
        batch=compute.batch,
        density=options.density,
        ranks=here.size,
        hosts=facts["hosts"],
        transport=here.transport.name,
        library=library.name,
        torch=torch.__version__,
        bits_per_second=facts["bits_per_second"],
        latency_seconds=facts["latency_seconds"],
        given_bits_per_second=options.bandwidth,
        cores=options.shared_cores,
        records=records(found, setting, cores, options.interface is not None),
    )


def _measure_link(transport: Transport, all_flags: list[int]) -> dict[str, Any]:
    """Return the network's measured link."""
    network, _ = measure_network(transport)
    link = network.link(1)
    hosts = count_hosts(transport)
    return {
        "hosts": hosts,
        "bits_per_second": 8.0 / link.seconds_per_byte if link.seconds_per_byte else 0.0,
        "latency_seconds": link.latency_seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
