"""`gtopk bench engine` as people call it: on every rank of a launcher, or alone on threads.

Gradients to reduce: as many and as large as a network's.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from collectives.errors import PeerError
from collectives.transports import Transport, local_world, run_ranks

from ....runtime.launch import launched_by
from ....runtime.machine import Machine, load, this_machine
from ....runtime.world.joining import join
from ...arguments import as_argument, output_file
from ..words import add_words, one_of
from .measure import GOAL_RATIO, Record, measure, table

# Of a bottleneck block: its width, and how many of them follow each other.
_STAGES: Final = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet50() -> list[int]:
    """Return the lengths of ResNet-50's 161 parameters, 25,557,032 in all (He et al. 2015)."""
    lengths = [3 * 64 * 7 * 7, 64, 64]
    channels = 64
    for width, blocks in _STAGES:
        wide = 4 * width
        for block in range(blocks):
            lengths += [channels * width, width, width]
            lengths += [9 * width * width, width, width]
            lengths += [width * wide, wide, wide]
            if block == 0:
                lengths += [channels * wide, wide, wide]
            channels = wide
    return [*lengths, 1000 * channels, 1000]


def small() -> list[int]:
    """Return the lengths of as many small parameters."""
    return [1000] * len(resnet50())


_GRADIENTS = {"resnet50": resnet50, "small": small}
_TIMEOUT_SECONDS = 3600.0


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk bench engine",
        description="Time negotiation by name, and steps through the engine, beside a bare "
        "allreduce of the same size: start it on the ranks to measure "
        "(mpirun -n 2 gtopk bench engine), or without a launcher on threads.",
        epilog="example:\n  mpirun -n 4 gtopk bench engine --json engine.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("--rounds", type=int, default=21, help="default: %(default)s")
    add_words(
        described,
        "--gradients",
        one_of(_GRADIENTS),
        list(_GRADIENTS),
        may_be_none=True,
        help=f"of {', '.join(_GRADIENTS)}; default: all",
    )
    described.add_argument("--json", type=as_argument(output_file), help="file to write")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank and return the exit code."""
    options = parser().parse_args(arguments)
    if options.rounds < 2:
        message = f"--rounds must be at least 2, got {options.rounds}"
        print(f"gtopk bench engine: {message}", file=sys.stderr)
        return 2
    if launched_by() is None:
        run_ranks(local_world(2, _TIMEOUT_SECONDS), lambda transport: _run(transport, options))
        return 0
    transport = join()
    try:
        _run(transport, options)
    except BaseException as error:
        if not isinstance(error, PeerError) or transport.rank == 0:
            traceback.print_exc()
        sys.stderr.flush()
        transport.abort(1)
        raise
    return 0


def _run(transport: Transport, options: argparse.Namespace) -> None:
    machine = this_machine()
    gradients = {name: _GRADIENTS[name]() for name in options.gradients}
    records = measure(transport, gradients, options.rounds)
    machine["load_after"] = load()
    if transport.rank == 0:
        _deliver(transport, records, machine, options.json)


def _deliver(
    transport: Transport, records: list[Record], machine: Machine, path: Path | None
) -> None:
    print(
        f"{transport.size} ranks, {transport.name} ({transport.library()}), "
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']} before "
        f"and {machine['load_after']} after; medians of the slowest rank; goal: a ratio of "
        f"{GOAL_RATIO} at most\n\n{table(records)}"
    )
    if path is not None:
        written = {
            "machine": machine,
            "ranks": transport.size,
            "transport": transport.name,
            "library": transport.library(),
            "records": records,
        }
        path.write_text(json.dumps(written, indent=1) + "\n")
        print(f"written to {path}")
