"""`gtopk simulate`: train in every mode of adaptive batches on a modelled cluster.

setting.py   shared by all modes: cluster, task, and the record of a run
ranks.py     where the simulated ranks run: threads of this process, or one process each
modes.py     the modes by name; delayed.py and replicas.py have the modes with several models
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from collectives.cost import Link

from ...adaptive.hogbatch.sizes import Thresholds, checked
from ...units import bandwidth, count, count_text, counted, digits, duration, seconds_text
from ..arguments import (
    PARAMETERS,
    STDOUT,
    Command,
    above_zero,
    fail,
    from_zero,
    number_in,
    records_file,
    share,
    write_records,
)
from ..bench.harness import one_of
from ..charts import aligned, wrapped
from .modes import DEFAULT, DENSE, OF_CLASSES, SIMULATED, SURVIVE_DEATHS
from .ranks import Processes, filtered_logs, processes_launched
from .setting import (
    GIGABIT,
    NETWORKS,
    Classes,
    Cluster,
    Death,
    Record,
    Setting,
    Slowdown,
    open_task,
)

# Limits in samples a second, so that the seconds of different ranks can be added without losing
# precision.
_SLOWEST, _FASTEST = 1e-6, 1e9
_SLOWDOWN = re.compile(r"(?P<rank>\d+):(?P<factor>[^@]+)@(?P<second>.+)")


def speeds(text: str) -> list[float]:
    """Parse samples a second, such as "400:200:100:100"."""
    try:
        values = [float(word) for word in text.split(":")]
    except ValueError:
        values = []
    if len(values) < 2 or not all(value > 0 for value in values):
        raise ValueError(f"must be samples a second of two or more ranks: 400:200, got {text!r}")
    if not all(_SLOWEST <= value <= _FASTEST for value in values):
        raise ValueError(f"must lie in {_SLOWEST:g}..{_FASTEST:g} samples a second, got {text!r}")
    return values


def slowdown(text: str) -> Slowdown:
    """Parse "0:4@30s": from second 30 on, rank 0 takes four times as long."""
    found = _SLOWDOWN.fullmatch(text)
    if found is None:
        raise ValueError(f"must be RANK:FACTOR@TIME, such as 0:4@30s, got {text!r}")
    try:
        factor = number_in("[1e-6, 1e6]")(found["factor"])
    except ValueError as error:
        raise ValueError(f"FACTOR {error}") from None
    return Slowdown(from_zero(found["rank"]), factor, duration(found["second"]))


def death(text: str) -> Death:
    """Parse "1@30s": rank 1 dies at second 30."""
    rank, _, second = text.partition("@")
    if not rank.isdecimal() or not second:
        raise ValueError(f"must be RANK@TIME, such as 1@30s, got {text!r}")
    return Death(from_zero(rank), duration(second))


def classes_sizes(text: str) -> dict[str, Thresholds]:
    """Parse batch size limits by class, such as "slow=4:64,fast=32:256"."""
    found = {}
    for word in text.split(","):
        name, _, pair = word.partition("=")
        smallest, _, largest = pair.partition(":")
        if name not in ("slow", "fast") or not smallest.isdecimal() or not largest.isdecimal():
            raise ValueError(f"must be like slow=4:64,fast=32:256, got {text!r}")
        found[name] = checked(
            Thresholds(from_zero(smallest), from_zero(largest)), f"the class {name!r}"
        )
    return found


def rank_list(text: str) -> list[int]:
    """Parse ranks, such as "0,2"."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise ValueError(f"must be ranks, such as 0,2, got {text!r}")
    return [from_zero(word) for word in text.split(",")]


def known_modes(text: str) -> list[str]:
    """Parse modes, such as "equal,balanced"."""
    return list(dict.fromkeys(map(one_of(SIMULATED), text.split(","))))


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk simulate",
        "Train on a modelled cluster with ranks of different speed: real model, "
        "gradients, residuals and collectives, simulated seconds. Shows which mode of adaptive "
        "batches pays there. Runs all ranks in this process, or one per process of a launcher.",
        "gtopk simulate --speeds 400:200:100:100 --modes equal,balanced,abs\n"
        "  mpirun -n 4 gtopk simulate --speeds 400:200:100:100",
    )
    option = described.option
    each = "samples per second of each rank; default: 400:200:100:100"
    option("--speeds", speeds, [400.0, 200.0, 100.0, 100.0], each)
    option("--overhead", duration, 0.0, "time added per batch; default: none")
    option("--noise", number_in("[0, 10]"), 0.03, "relative noise of a batch's time")
    slow = "slow a rank down, such as 0:4@30s; may be repeated; default: none"
    option("--slow", slowdown, [], slow, action="append", metavar="RANK:FACTOR@TIME")
    die = f"let a rank die, such as 1@30s; for {', '.join(SURVIVE_DEATHS)}; default: none"
    option("--die", death, [], die, action="append", metavar="RANK@TIME")
    link = "bandwidth of each rank's link; default: 1gbit"
    option("--bandwidth", bandwidth, GIGABIT.bits_per_second, link)
    latency = f"latency per message; default: {1e6 * GIGABIT.latency_seconds:g}us"
    option("--latency", duration, GIGABIT.latency_seconds, latency)
    option("--exchange", duration, None, "time per step, instead of the link's model")
    hides = "share of a batch's time that hides the exchange of synchronous modes"
    option("--overlap", number_in("[0, 1]"), 0.0, hides, metavar="SHARE")
    model = "model whose exchange is modelled"
    option("--model", None, None, model, choices=PARAMETERS, metavar="NAME")
    option("--task", None, "digits", "what to train", choices=NETWORKS)
    option("--epochs", count, 20, "epochs")
    evaluations = "samples between evaluations; default: an epoch"
    option("--evaluate-every", count, 0, evaluations, metavar="SAMPLES")
    option("--seeds", count, 1, "runs per mode")
    option("--batch", count, 256, "batch size over all ranks")
    option("--micro-batch", count, 8, "of mode abs")
    option("--max-batch", count, 0, "largest batch of mode goodput; default: 8 times --batch")
    mega = "samples of mode adaptive-sgd's mega-batch; default: 100 batches"
    option("--mega-batch", count, 0, mega)
    fast = "ranks of hogbatch's fast class; default: the fastest"
    option("--fast", rank_list, None, fast, metavar="RANKS")
    overhead = "time added to each of their batches; default: --overhead"
    option("--fast-overhead", duration, None, overhead, metavar="TIME")
    sizes = "batch sizes of hogbatch; default: slow=4:64,fast=32:256"
    option("--sizes", classes_sizes, Classes().sizes, sizes)
    option("--interval", count, 5, "steps per window of mode balanced")
    option("--lr", above_zero, 0.5, "learning rate")
    option("--momentum", number_in("[0, 1)"), 0.0, "SGD's momentum")
    density = "share of entries sent, or 'dense'; default: 0.05"
    option("--density", lambda text: None if text == "dense" else share(text), 0.05, density)
    option("--target", share, 0.9, "accuracy to reach")
    compared = f"modes to compare, from {', '.join(SIMULATED)}; default: {', '.join(DEFAULT)}"
    option("--modes", known_modes, list(DEFAULT), compared)
    written = "write the records as JSON; without FILE: print only them"
    option("--json", Path, None, written, nargs="?", const=STDOUT, metavar="FILE")
    return described


@filtered_logs()
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit code."""
    options = parser().parse_args(arguments)
    cluster = Cluster(
        options.speeds,
        options.overhead,
        options.noise,
        options.slow,
        options.die,
        Link.of(options.bandwidth, options.latency),
        options.exchange,
    )
    processes = processes_launched()
    is_first = processes is None or 0 in processes.here
    error_text = _argument_error(options, cluster, processes) or _file_error(options, processes)
    if error_text:
        if is_first:
            print(f"gtopk simulate: {error_text}", file=sys.stderr)
        return 2
    # Each simulated rank is a thread or a process, so torch's threads would compete for the cores.
    torch.set_num_threads(1)
    records: list[Record] = []
    for seed in range(options.seeds):
        setting = _setting(options, cluster, seed, processes)
        for mode in options.modes:
            if is_first:
                print(f"simulating {mode}, seed {seed}", file=sys.stderr)
            try:
                records.append(SIMULATED[mode](setting))
            except ValueError as error:
                # Let the world's excepthook inform the other ranks' processes.
                if processes is not None:
                    raise
                return fail("simulate", f"{mode}: {error}")
            # Write after each mode, because the next may take hours or fail.
            if is_first and options.json != STDOUT:
                write_records(_as_record(records, setting), options.json)
    if is_first and options.json == STDOUT:
        write_records(_as_record(records, setting))
    elif is_first:
        print(*render(records, setting, options.target), sep="\n")
    return 0


def _argument_error(
    options: argparse.Namespace, cluster: Cluster, processes: Processes | None
) -> str | None:
    """Return why this cannot be simulated, the same on every rank; None if it can."""
    if processes is not None and processes.size != cluster.ranks:
        return (
            f"--speeds has {cluster.ranks} ranks, and {processes.size} processes were started: "
            f"start {cluster.ranks}, or no launcher, to compute all ranks in one process"
        )
    for name, changes in (("--slow", options.slow), ("--die", options.die)):
        if any(change.rank >= cluster.ranks for change in changes):
            return f"{name} must name ranks 0..{cluster.ranks - 1}, those of --speeds"
    if any(rank >= cluster.ranks for rank in options.fast or ()):
        return f"--fast must name ranks 0..{cluster.ranks - 1}, those of --speeds"
    if "slow-only" in options.modes and len({*_classes(options).fast}) == cluster.ranks:
        return "slow-only needs a slow rank, but all ranks are fast: name fewer with --fast"
    if importlib.util.find_spec("sklearn") is None:
        return "scikit-learn, which has the digits, is not installed: pip install scikit-learn"
    if options.die and (others := [mode for mode in options.modes if mode not in SURVIVE_DEATHS]):
        return f"{others[0]} ends if a rank dies; --die is for {', '.join(SURVIVE_DEATHS)}"
    if options.lr > (most := torch.finfo(torch.float32).max):
        return f"--lr must be at most {most:g}, got {options.lr:g}"
    if options.batch < 8 * cluster.ranks:
        return f"--batch must be at least {8 * cluster.ranks}, got {options.batch}"
    return None


def _file_error(options: argparse.Namespace, processes: Processes | None) -> str | None:
    """Return why rank 0 cannot write the file, before anything is computed; None if it can."""
    reason = ""
    if options.json is not None:
        try:
            records_file(str(options.json))
        except ValueError as error:
            reason = str(error)
    # Share rank 0's answer, so that all processes exit instead of waiting for rank 0.
    failed = torch.tensor([bool(reason)])
    if processes is not None:
        processes.broadcast(failed, 0)
    return (reason or "rank 0 cannot write") if failed else None


def _setting(
    options: argparse.Namespace, cluster: Cluster, seed: int, processes: Processes | None
) -> Setting:
    length = PARAMETERS[options.model] if options.model else None
    return Setting(
        cluster,
        open_task(options.task, seed, length),
        seed,
        options.epochs,
        options.batch,
        options.lr,
        options.momentum,
        options.density,
        interval=options.interval,
        micro_batch=options.micro_batch,
        max_batch=options.max_batch,
        mega_batch=options.mega_batch,
        evaluate_every=options.evaluate_every,
        overlap=options.overlap,
        # Modes with classes are compared by loss, so the other modes must record it too.
        losses=any(mode in OF_CLASSES for mode in options.modes),
        classes=_classes(options),
        processes=processes,
    )


def _classes(options: argparse.Namespace) -> Classes:
    fastest = max(options.speeds)
    found = [rank for rank, speed in enumerate(options.speeds) if speed == fastest]
    # A class not given in --sizes keeps its default sizes.
    return Classes(
        options.fast or found, options.fast_overhead, {**Classes().sizes, **options.sizes}
    )


def _as_record(records: Sequence[Record], setting: Setting) -> dict[str, Any]:
    return {
        "simulated": True,
        "cluster": setting.cluster,
        "reduce_seconds": setting.reduce_seconds,
        "dense_reduce_seconds": setting.dense_seconds,
        "records": records,
    }


_CLASS_HEADINGS = ("mode", "loss", "to common", "slow's updates", "used: slow", "fast", "stale")
NOTES: Final = (
    "loss: of all training samples, at the end. to common: simulated seconds to the loss that all "
    "modes reach, seed by seed. slow's updates: the slow class's share of them. used: samples "
    "computed, of what the class could compute in batches of its largest size. stale: others' "
    "updates that a gradient is old."
)


def render_classes(records: Sequence[Record], setting: Setting) -> list[list[str]]:
    """Return the rows of a table, medians over the seeds; empty if no mode has classes."""
    if not any(record.used for record in records):
        return []
    # Per seed, as data and weights differ: the highest of the modes' final losses, which all modes
    # reach.
    common = {
        seed: max(
            (
                record.loss[-1][1]
                for record in records
                if record.loss and record.seed == seed and math.isfinite(record.loss[-1][1])
            ),
            # A loss that no mode reaches.
            default=-math.inf,
        )
        for seed in {record.seed for record in records}
    }
    modes = list(dict.fromkeys(record.mode for record in records if record.loss))
    rows = [list(_CLASS_HEADINGS)]
    for mode in modes:
        runs = [record for record in records if record.mode == mode]
        reached = [run.seconds_to_loss(common[run.seed]) for run in runs]
        rows.append(
            [
                mode,
                f"{statistics.median(run.loss[-1][1] for run in runs):.4f}",
                _median_text(reached),
                *_class_cells(runs, setting),
            ]
        )
    return rows


def _class_cells(runs: Sequence[Record], setting: Setting) -> list[str]:
    if not runs[0].used:
        return ["-"] * 4
    shares = []
    for run in runs:
        by_rank = [sum(column) for column in zip(*run.updates, strict=True)]
        slow = sum(n for rank, n in enumerate(by_rank) if setting.classes.name(rank) == "slow")
        shares.append(slow / sum(by_rank))
    used = [statistics.median(run.used[name] for run in runs) for name in ("slow", "fast")]
    return [
        f"{statistics.median(shares):.3f}",
        *(f"{share:.2f}" for share in used),
        f"{statistics.median(run.staleness for run in runs):.1f}",
    ]


_HEADINGS = ("mode", "samples/s", "vs first", "busy", "least", "accuracy %", "updates", "to target")


def render(records: Sequence[Record], setting: Setting, target: float) -> list[str]:
    """Return the lines: the setting, and a row for each mode with medians over the seeds."""
    cluster = setting.cluster
    modes = list(dict.fromkeys(record.mode for record in records))
    speeds = ":".join(f"{speed:g}" for speed in cluster.speeds)
    seeds = len({record.seed for record in records})
    method = "dense" if setting.density is None else f"gTop-k at density {setting.density:g}"
    slower = "".join(
        f"; rank {slow.rank} takes {slow.factor:g} times as long from second {slow.second:g} on"
        for slow in cluster.slowdowns
    )
    slower += "".join(
        f"; rank {death.rank} dies at second {death.second:g}" for death in cluster.deaths
    )
    dense = ""
    dense_modes = [mode for mode in modes if mode in DENSE]
    if setting.density is not None and dense_modes:
        dense = f", dense, as in {', '.join(dense_modes)}, {seconds_text(setting.dense_seconds)}"
    overlap = ""
    if setting.overlap:
        overlap = f", beside {100 * setting.overlap:g} % of a synchronous step's computation"
    intro = (
        f"Simulated, not measured: {cluster.ranks} ranks of {speeds} samples/s, overhead "
        f"{seconds_text(cluster.overhead_seconds)}, noise {cluster.noise:g}{slower}; an "
        f"exchange of {count_text(setting.task.length)} values by {method} takes "
        f"{seconds_text(setting.reduce_seconds)}{dense}{overlap}. Batch {setting.global_batch}, "
        f"learning rate {setting.learning_rate:g}, momentum {setting.momentum:g}, "
        f"{counted(setting.epochs, 'epoch')}, {counted(seeds, 'seed')}. "
        f"Gradients, residuals and collectives are real."
    )
    by_mode = {mode: [r for r in records if r.mode == mode] for mode in modes}
    base = statistics.median([record.samples_per_second for record in by_mode[modes[0]]])
    rows = [_HEADINGS, *(_row(mode, runs, base, target) for mode, runs in by_mode.items())]
    notes = (
        "busy: mean share of the time that ranks compute. least: of the rank that computes least, "
        "of the time off the wire; of abs, of all time. accuracy: median (lowest-highest). to "
        f"target: simulated seconds to {100 * target:g} %."
    )
    lines = [*wrapped(intro), "", *aligned(rows), "", *wrapped(notes)]
    skipped = {mode: sum(run.skipped for run in runs) for mode, runs in by_mode.items()}
    if any(skipped.values()):
        lines += ["", *wrapped(_skipped_text(skipped))]
    if class_rows := render_classes(records, setting):
        lines += ["", *aligned(class_rows), "", *wrapped(NOTES)]
    return lines


def _skipped_text(skipped: Mapping[str, int]) -> str:
    """Report values skipped because they were not finite, as when training diverges."""
    times = (f"{mode} {counted(n, 'time')}" for mode, n in skipped.items() if n)
    return f"Not finite, and left out as in a real run: {', '.join(times)}. Try a smaller --lr."


def _row(mode: str, runs: Sequence[Record], base: float, target: float) -> tuple[str, ...]:
    speed = statistics.median([run.samples_per_second for run in runs])
    final = [100 * run.final_accuracy for run in runs]
    reached = [run.seconds_to(target) for run in runs]
    spread = f" ({min(final):.1f}-{max(final):.1f})" if len(runs) > 1 else ""
    return (
        mode,
        digits(speed),
        f"{speed / base:.2f}x",
        f"{statistics.median([run.utilisation for run in runs]):.3f}",
        f"{statistics.median([run.least_utilisation for run in runs]):.3f}",
        f"{statistics.median(final):.1f}{spread}",
        count_text(statistics.median([float(run.steps) for run in runs])),
        _median_text(reached),
    )


def _median_text(reached: Sequence[float | None]) -> str:
    """Return the median of the runs' seconds; "not reached" if it is missing for any run."""
    seconds = [second for second in reached if second is not None]
    if len(seconds) < len(reached):
        return "not reached"
    return seconds_text(statistics.median(seconds))
