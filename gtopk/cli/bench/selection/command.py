"""The command `gtopk bench selection`: options, progress, a table, and JSON.

Adverse cases: selections with a wrong guess, or with unusual values. Each is one residual, to which
zeros are added, and one guess at the threshold with which every round begins. The result is right
all the same; the time is measured.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from collectives import SparseVector, kernels
from collectives.cores import usable_cores
from collectives.kernels import host, reference, why_not_compiled
from collectives.kernels.device.timing import Row
from collectives.kernels.device.timing import measure as measure_kernels
from collectives.kernels.device.timing import table as kernel_table

from ...arguments import as_argument, share, whole_number
from ..harness import add_words, bench_parser, one_of, refuse, show_progress, write_json
from .measure import (
    MAKERS,
    MergeRecord,
    Record,
    count_rescans,
    measure,
    measure_merges,
    open_gpu,
    records_of,
    rows_of,
    run_round,
    why_no_gpu,
)
from .methods import (
    COPY,
    FLOOR,
    Array,
    Host,
    Method,
    Place,
    all_methods,
    floor,
    open_source,
    torch_topk,
    wanted,
)


class Case(NamedTuple):
    """One residual, float32 [n], and a guess at its k-th largest |value|."""

    name: str
    residual: Array
    guess: float


def cases(length: int, k: int) -> Iterator[Case]:
    """Make one case after the other."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(length, np.float32)
    at_k = float(np.partition(np.abs(normal), length - k)[length - k])
    yield Case("normal values, guess 2 times too high", normal, 2 * at_k)
    yield Case("normal values, guess 1e30", normal, 1e30)
    yield Case("all equal, half of it for a guess", np.ones(length, np.float32), 0.5)
    few = np.zeros(length, np.float32)
    few[random.choice(length, k // 2, replace=False)] = 1
    yield Case("fewer than k that are not zero", few, 0.5)
    normal[random.random(length) < 0.1] = np.nan
    yield Case("10 % NaN", normal, at_k)
    ascending = np.linspace(0, 1, length, dtype=np.float32)
    yield Case("ascending, half the guess", ascending, 0.5)
    yield Case("ascending, no guess", ascending, 0.0)


def _guided(twin: object, guess: float, residual: Array, gradient: Array, k: int) -> SparseVector:
    picked: SparseVector
    picked, _ = twin.accumulate_and_select(  # type: ignore[attr-defined]
        residual, gradient, k, guess
    )
    twin.clear_at(residual, picked.indices)  # type: ignore[attr-defined]
    return picked


def _methods(guess: float) -> list[Method]:
    twins = {} if why_not_compiled() else {"gtopk-compiled": host}
    twins["gtopk-reference"] = reference
    ours = [Method(name, partial(_guided, twin, guess)) for name, twin in twins.items()]
    return [Method(FLOOR, floor), *ours, Method("torch.topk", torch_topk)]


def measure_cases(
    length: int,
    density: float,
    device: str,
    words: Sequence[str] | None,
    rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[Record]]:
    """Time those of our twins and torch.topk that are among the words, or all, case by case."""
    k = max(2, round(length * density))
    nothing = np.full(length, 1, np.float32)
    nothing[:] = 0  # memory of its own: pages of fresh zeros would all be one
    for case in cases(length, k):
        place = Host(device, _methods(case.guess))
        rows = rows_of({place: wanted(place.names, words)})
        for number in range(rounds + 2):
            progress(f"{case.name}: round {number - 1} of {rounds}")
            run_round(rows, case.residual, nothing, k, note=number >= 2)
        yield records_of(rows, f"{case.name} (synthetic)", length, k, density)


SOURCES = ("training", "gaussian", "laplace")
ADVERSE = "adverse"
DATA = (*SOURCES, ADVERSE)
OURS = ("gtopk-compiled", "gtopk-reference", "gtopk-cuda")


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = bench_parser(
        "selection",
        "Time a step of error feedback (accumulate, select, clear) by our kernels and "
        "by others, in turn in one run, and check what each of them selects.",
    )
    add_words(
        described,
        "--elements",
        whole_number,
        [25_600_000],
        metavar="N",
        help="length of the gradient; default: 25600000",
    )
    described.add_argument(
        "--density",
        type=as_argument(share),
        default=0.001,
        help="share of entries selected; default: %(default)s",
    )
    data = f"gradients to select from: {', '.join(DATA)} (bad guesses, NaN, ties); default: all"
    add_words(described, "--data", one_of(DATA), DATA, help=data)
    add_words(described, "--methods", str, help="methods to time; default: all")
    described.add_argument(
        "--rounds", type=int, default=7, help="timed rounds of each method; default: %(default)s"
    )
    described.add_argument(
        "--warm-up", type=int, default=20, help="untimed rounds before those; default: %(default)s"
    )
    described.add_argument(
        "--threads",
        type=int,
        default=usable_cores(),
        help="threads of the multi-threaded method; default: all cores",
    )
    described.add_argument(
        "--rescans",
        type=as_argument(whole_number),
        metavar="STEPS",
        help="time nothing; count how many of STEPS steps scan the residual a second time, "
        "while density and learning rate change",
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    for name in ("rounds", "threads", "warm_up"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            return refuse(
                "selection", f"--{option} must be at least 1, got {getattr(options, name)}"
            )
    methods = all_methods(options.threads)
    no_gpu = why_no_gpu()
    known = dict.fromkeys([*(method.name for method in methods), *([] if no_gpu else MAKERS)])
    unknown = set(options.methods or known) - set(known)
    if unknown:
        return refuse(
            "selection", f"--methods must be among {', '.join(known)}; got {', '.join(unknown)}"
        )
    torch.set_num_threads(1)
    machine = describe()
    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    if options.rescans:
        return _rescans(options, machine)
    print("times are medians of rounds, with the lowest and the highest of the ratios")
    print(f"{no_gpu}\n" if no_gpu else "")
    records: list[Record] = []
    merges: list[MergeRecord] = []
    rows: list[Row] = []
    for elements in options.elements:
        if ADVERSE in options.data:
            device = machine["processor"]
            for found in measure_cases(
                elements, options.density, device, options.methods, options.rounds, show_progress
            ):
                show_progress()
                print(table(found))
                records += found
        for name in options.data:
            if name == ADVERSE:
                continue
            places: list[Place] = [Host(machine["processor"], methods)]
            places += [] if no_gpu else [open_gpu()]
            chosen = {place: wanted(place.names, options.methods) for place in places}
            source = open_source(name, elements)
            found = measure(
                source, options.density, chosen, options.rounds, options.warm_up, show_progress
            )
            show_progress()
            for place in places:
                print(table([record for record in found if record.device == place.device]))
            records += found
        k = max(1, round(elements * options.density))
        if not no_gpu:
            rows += (of_kernels := measure_kernels(elements, k, options.rounds))
            print("\n".join(kernel_table(of_kernels)) + "\n")
        merged = measure_merges(k, rounds=31)
        for merge in merged:
            each = merge.nanoseconds_per_input_entry
            what = f"{'merge' if merge.lists == 2 else 'sum'} of {merge.lists} lists"
            print(
                f"{what} of {merge.k:,}, {merge.method}: {each.median:.1f} ns "
                f"({each.low:.1f}-{each.high:.1f}) per input entry"
            )
        print()
        merges += merged
    write_json(as_json(machine, records, merges, rows), options.json)
    return 0


def _rescans(options: argparse.Namespace, machine: dict[str, str]) -> int:
    """Count, print and write what --rescans asks for."""
    counted = [
        record
        for elements in options.elements
        for name in options.data
        if name != ADVERSE
        for record in count_rescans(
            open_source(name, elements), options.density, options.rescans, show_progress
        )
    ]
    show_progress()
    for record in counted:
        right = "exact" if record.exact else "NOT EXACT"
        print(
            f"{record.data}, n = {record.n:,}, density {record.density:g}, {record.method}: "
            f"{record.rescans} of {record.steps:,} steps read the residual again "
            f"({record.share:.2%}), {record.at_changes} of them just after one of "
            f"{record.density_changes} changes of density and {record.rate_drops} drops; {right}"
        )
    fields = [record._asdict() | {"share": record.share} for record in counted]
    write_json({"machine": machine, "rescans": fields}, options.json)
    return 0


def describe() -> dict[str, str]:
    """Return the facts of the machine on which the figures depend."""
    return {
        "processor": _processor(),
        "cores": str(usable_cores()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "kernels": kernels.in_use(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(records: Sequence[Record]) -> str:
    """Return the records of one kind of data as lines."""
    first = records[0]
    by_name = {record.method: record for record in records}
    lines = [
        f"{first.data}, n = {first.n:,}, k = {first.k:,} (density {first.density:g})",
        f"on {first.device}, by torch {first.torch}",
    ]
    lines.append(f"  {'':28} {'ms':>9} {'over a += g':>22} {'selected / k':>13}")
    for record in records:
        ratio = record.over_floor
        ratios = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        share = "exact" if record.exact else f"{record.selected / record.k:.3g}"
        if record.method in (FLOOR, COPY):
            share = ""
        name = record.method + (" [wall]" if record.clock == "wall" else "")
        lines.append(f"  {name:28} {1e3 * record.seconds.median:9.2f} {ratios:>22} {share:>13}")
    ours = [by_name[name] for name in OURS if name in by_name]
    if "torch.topk" in by_name:
        topk = by_name["torch.topk"].seconds.median
        for record in ours:
            faster = topk / record.seconds.median
            lines.append(f"  {record.method} is {faster:.1f} times as fast as torch.topk")
    return "\n".join(lines) + "\n"


def as_json(
    machine: dict[str, str],
    records: Sequence[Record],
    merges: Sequence[MergeRecord],
    rows: Sequence[Row],
) -> dict[str, object]:
    """Return everything in the form that is written; times as median, with low and high beside."""
    flat = []
    for record in records:
        fields = record._asdict() | {
            "seconds": record.seconds.median,
            "seconds_low": record.seconds.low,
            "seconds_high": record.seconds.high,
            "over_floor": record.over_floor.median,
            "over_floor_low": record.over_floor.low,
            "over_floor_high": record.over_floor.high,
        }
        flat.append(fields)
    listed = [
        {
            "method": merge.method,
            "lists": merge.lists,
            "k": merge.k,
            "nanoseconds_per_input_entry": merge.nanoseconds_per_input_entry.median,
        }
        for merge in merges
    ]
    kernels_of_gpu = [row._asdict() for row in rows]
    return {"machine": machine, "records": flat, "merges": listed, "gpu_kernels": kernels_of_gpu}
