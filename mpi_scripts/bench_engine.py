"""Time the engine and a bare allreduce in turns, on the same ranks.

mpirun -n 2 python mpi_scripts/bench_engine.py --json engine.json       alone, on two threads

    negotiation   all ranks announce and match names,    compared with an allreduce of as many
                  without any thread                     bytes
    step          gradients submitted and waited for,    compared with one allreduce of all of
                  through the engine                     them, flat

A round's time is that of the slowest rank. Ratios compare the two times of the same round.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypedDict

import numpy as np

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.transports import Transport
from gtopk.cli.arguments import at_least, text_stream, write_records
from gtopk.cli.bench.harness import (
    Spread,
    add_words,
    bench_parser,
    on_ranks,
    one_of,
    resnet50,
    spread,
)
from gtopk.cli.charts import aligned
from gtopk.runtime.coordinator import Engine, Operation, Settings
from gtopk.runtime.coordinator.fusion import Dense, layout_of
from gtopk.runtime.coordinator.operation import (
    Announcement,
    OperationSpec,
    Request,
    gather_announcements,
)
from gtopk.runtime.coordinator.readiness_table import ReadinessTable
from gtopk.runtime.machine import load, this_machine

GOAL_RATIO: Final = 1.5
_WARM_UP_ROUNDS: Final = 3
# One negotiation alone is too short to time.
_REPEATS: Final = 50


class Record(TypedDict):
    """One case; cycles: of the engine in a step, None in a negotiation alone."""

    case: str
    names: int
    bytes: int
    engine_seconds: Spread
    bare_seconds: Spread
    ratio: Spread
    goal_ratio: float
    cycles: Spread | None


def measure(
    transport: Transport, gradients: Mapping[str, Sequence[int]], rounds: int
) -> list[Record]:
    """Return the records of all cases; all ranks measure together."""
    records = [negotiation(transport, names, rounds) for names in (1, 161, 1024)]
    # The engine must not use the transport outside its turns.
    settings = Settings(stall_warning_seconds=float("inf"), idle_seconds=float("inf"))
    engine = Engine(transport, settings)
    for case, lengths in gradients.items():
        records.append(step(engine, case, lengths, rounds))
    engine.close("the benchmark is done")
    return records


def negotiation(transport: Transport, names: int, rounds: int) -> Record:
    """Time cycles in which every rank is ready for all names, each with a slot."""
    table = ReadinessTable(transport.ranks, capacity=names)
    layout = layout_of(Dense(np.zeros(1, np.float32)))
    spec = OperationSpec(("float32 [1]",), None, (layout,))
    requests = [Request(f"allreduce.{number}", spec, 0) for number in range(names)]
    # Once by name, outside the timing: in training, names have slots from the second step on.
    table.enter(gather_announcements(transport, Announcement(fresh=tuple(requests)), table.slots))
    words = -(-names // 64)
    bare = np.zeros(transport.size * (1 + words), np.int64)

    def negotiate() -> None:
        announcement = table.announcement_of([*requests], transport.rank)
        outcome = table.enter(gather_announcements(transport, announcement, table.slots))
        assert len(outcome.ready) == names

    def allreduce() -> None:
        transport.allreduce(bare)

    times = _alternate(transport, negotiate, allreduce, rounds, _REPEATS)
    return _record(f"negotiation of {names}", names, bare.nbytes, *times)


def step(engine: Engine, case: str, lengths: Sequence[int], rounds: int) -> Record:
    """Time steps in which gradients are submitted one by one, and then waited for."""
    arrays = [np.zeros(length, np.float32) for length in lengths]
    flat = np.zeros(sum(lengths), np.float32)
    signatures = [[f"torch.float32 [{length}] op=Sum"] for length in lengths]
    cycles: list[int] = []

    def nothing(transport: Transport, all_flags: list[int]) -> None:
        """Reduce nothing."""

    def reduce_all() -> None:
        before = engine.cycles
        operations: list[Operation] = [
            engine.submit(f"{case}.{number}", signature, nothing, fusion=[Dense(array)])
            for number, (array, signature) in enumerate(zip(arrays, signatures, strict=True))
        ]
        for operation in operations:
            operation.wait()
        # The engine's thread sets the last outcome before it is idle. Wait until it is, or it would
        # still send during the bare allreduce.
        while engine.activity != "idle":
            time.sleep(0)
        cycles.append(engine.cycles - before)

    def allreduce() -> None:
        engine.transport.allreduce(flat)

    times = _alternate(engine.transport, reduce_all, allreduce, rounds, 1)
    record = _record(f"step of {case}", len(lengths), flat.nbytes, *times)
    record["cycles"] = spread(cycles[_WARM_UP_ROUNDS:])
    return record


def _alternate(
    transport: Transport,
    ours: Callable[[], None],
    bare: Callable[[], None],
    rounds: int,
    repeats: int,
) -> tuple[list[float], list[float]]:
    """Return the seconds of each in every round, of the slowest rank."""
    seconds = np.zeros((2, _WARM_UP_ROUNDS + rounds))
    for number in range(seconds.shape[1]):
        # In turns, so that the machine's other work affects both equally.
        for row, call in enumerate((ours, bare)):
            transport.barrier()
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds[row, number] = (time.perf_counter() - begun) / repeats
    # After all rounds: an exchange between them would be part of what is measured.
    transport.allreduce(seconds.reshape(-1), "max")
    ours_seconds, bare_seconds = seconds[:, _WARM_UP_ROUNDS:].tolist()
    return ours_seconds, bare_seconds


def _record(case: str, names: int, size_bytes: int, ours: list[float], bare: list[float]) -> Record:
    return Record(
        case=case,
        names=names,
        bytes=size_bytes,
        engine_seconds=spread(ours),
        bare_seconds=spread(bare),
        ratio=spread([a / b for a, b in zip(ours, bare, strict=True)]),
        goal_ratio=GOAL_RATIO,
        cycles=None,
    )


def table(records: Sequence[Record]) -> str:
    """Return the records as lines of text."""
    rows = [("", "bytes", "engine", "bare", "ratio", "quartiles", "cycles a step")]
    for record in records:
        ratio, cycles = record["ratio"], record["cycles"]
        rows.append(
            (
                record["case"],
                f"{record['bytes']:,}",
                _milliseconds(record["engine_seconds"]),
                _milliseconds(record["bare_seconds"]),
                f"{ratio['median']:.2f}",
                f"{ratio['lower_quartile']:.2f}..{ratio['upper_quartile']:.2f}",
                f"{cycles['median']:g} (most: {cycles['max']:g})" if cycles else "",
            )
        )
    return "\n".join(aligned(rows))


def _milliseconds(seconds: Spread) -> str:
    return f"{seconds['median'] * 1e3:.3f} ms"


_RESNET50: Final = [math.prod(shape) for layer in resnet50() for shape in layer]
# "small": as many tensors, but so short that the engine's own work dominates.
GRADIENTS: Final = {"resnet50": _RESNET50, "small": [1000] * len(_RESNET50)}  # lengths


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = bench_parser(
        "python mpi_scripts/bench_engine.py",
        "Time negotiation by name, and steps through the engine, compared with a bare "
        "allreduce of the same size: start it on the ranks to measure "
        "(mpirun -n 2), or without a launcher on threads.",
        launched=True,
    )
    described.option("--rounds", at_least(2), 21, "timed rounds")
    add_words(
        described,
        "--gradients",
        one_of(GRADIENTS),
        list(GRADIENTS),
        may_be_none=True,
        help=f"models whose gradients are reduced, from {', '.join(GRADIENTS)}; default: all",
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank and return the exit code."""
    options = parser().parse_args(arguments)
    return on_ranks(lambda transport: _run(transport, options), threads=2)


def _run(transport: Transport, options: argparse.Namespace) -> None:
    machine = this_machine()
    gradients = {name: GRADIENTS[name] for name in options.gradients}
    records = measure(transport, gradients, options.rounds)
    machine["load_after"] = load()
    if transport.rank != 0:
        return
    summary = (
        f"{transport.size} ranks, {transport.name} ({transport.library()}), "
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']} before "
        f"and {machine['load_after']} after; medians of the slowest rank; goal: a ratio of "
        f"{GOAL_RATIO} at most\n\n{table(records)}"
    )
    print(summary, file=text_stream(options.json))
    written = {
        "machine": machine,
        "ranks": transport.size,
        "transport": transport.name,
        "library": transport.library(),
        "records": records,
    }
    write_records(written, options.json)


if __name__ == "__main__":
    sys.exit(main())
