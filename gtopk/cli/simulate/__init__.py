"""`gtopk simulate`: trains in every mode of adaptive batches on a modelled cluster.

setting.py   what all modes share: cluster, task, and the record that each makes
ranks.py     who computes the simulated ranks: threads of this process, or a process each
modes.py     the modes by name; delayed.py, replicas.py and hogbatch.py have those with a queue
show.py      the comparison as text
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from collectives.cost import Link

from ...adaptive.hogbatch.sizes import Thresholds, checked
from ..arguments import (
    PARAMETERS,
    Command,
    above_zero,
    bandwidth,
    count,
    duration,
    number_in,
    share,
)
from .modes import DEFAULT, OF_CLASSES, OUTLIVE, SIMULATED
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
from .show import render

_SLOWEST, _FASTEST = 1e-6, 1e9  # beyond, a batch's seconds are lost beside others, or others in it
_SLOWDOWN = re.compile(r"(?P<rank>\d+):(?P<factor>[\d.]+)@(?P<second>.+)")


def speeds(text: str) -> list[float]:
    """Return samples a second of "400:200:100:100"."""
    try:
        values = [float(word) for word in text.split(":")]
    except ValueError:
        values = []
    if len(values) < 2 or not all(value > 0 for value in values):
        raise ValueError(f"must be two ranks' samples a second or more, as 400:200, got {text!r}")
    if not all(_SLOWEST <= value <= _FASTEST for value in values):
        raise ValueError(f"must lie in {_SLOWEST:g}..{_FASTEST:g} samples a second, got {text!r}")
    return values


def slowdown(text: str) -> Slowdown:
    """Return the change of "0:4@30s": rank 0 takes four times as long from second 30 on."""
    found = _SLOWDOWN.fullmatch(text)
    if found is None:
        raise ValueError(f"must be RANK:FACTOR@TIME, as 0:4@30s, got {text!r}")
    try:
        factor = number_in("[1e-6, 1e6]")(found["factor"])
    except ValueError as error:
        raise ValueError(f"FACTOR {error}") from None
    return Slowdown(int(found["rank"]), factor, duration(found["second"]))


def death(text: str) -> Death:
    """Return the end of "1@30s": rank 1 is gone from second 30 on."""
    rank, _, second = text.partition("@")
    if not rank.isdecimal() or not second:
        raise ValueError(f"must be RANK@TIME, as 1@30s, got {text!r}")
    return Death(int(rank), duration(second))


def classes_sizes(text: str) -> dict[str, Thresholds]:
    """Return the thresholds of "slow=4:64,fast=32:256"."""
    found = {}
    for word in text.split(","):
        name, _, pair = word.partition("=")
        smallest, _, largest = pair.partition(":")
        if name not in ("slow", "fast") or not smallest.isdecimal() or not largest.isdecimal():
            raise ValueError(f"must be as slow=4:64,fast=32:256, got {text!r}")
        found[name] = checked(Thresholds(int(smallest), int(largest)), f"the class {name!r}")
    return found


def rank_list(text: str) -> list[int]:
    """Return the ranks of "0,2"."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise ValueError(f"must be ranks, as 0,2, got {text!r}")
    return [int(word) for word in text.split(",")]


def dense_or_density(text: str) -> float | None:
    """Return gTop-k's density; None for "dense"."""
    return None if text == "dense" else share(text)


def known_modes(text: str) -> list[str]:
    """Return the modes of "equal,balanced"."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SIMULATED]:
        raise ValueError(f"must be of {', '.join(SIMULATED)}, got {unknown[0]!r}")
    return list(dict.fromkeys(names))


def parser() -> Command:
    """Return the command line's grammar."""
    described = Command(
        "simulate",
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
    die = f"let a rank die, such as 1@30s; for {', '.join(OUTLIVE)}; default: none"
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
    option("--density", dense_or_density, 0.05, density)
    option("--target", share, 0.9, "accuracy to reach")
    compared = f"modes to compare, from {','.join(SIMULATED)}; default: {','.join(DEFAULT)}"
    option("--modes", known_modes, list(DEFAULT), compared)
    written = "write the records as JSON; without FILE: print only them"
    option("--json", None, None, written, nargs="?", const="-", metavar="FILE")
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
    refused = _refusal(options, cluster, processes) or _unwritable(options, processes)
    if refused:
        if is_first:
            print(f"gtopk simulate: {refused}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the ranks are threads, or share the machine
    records: list[Record] = []
    for seed in range(options.seeds):
        setting = _setting(options, cluster, seed, processes)
        for mode in options.modes:
            if is_first:
                print(f"simulating {mode}, seed {seed}", file=sys.stderr)
            try:
                records.append(SIMULATED[mode](setting))
            except ValueError as error:
                if processes is not None:
                    raise  # the other ranks are to hear of it
                print(f"gtopk simulate: {mode}: {error}", file=sys.stderr)
                return 1
            if is_first and options.json not in (None, "-"):  # now: the others may take long
                Path(options.json).write_text(_json(records, setting) + "\n", encoding="utf-8")
    if is_first:
        lines = render(records, setting, options.target)
        print(*([_json(records, setting)] if options.json == "-" else lines), sep="\n")
    return 0


def _refusal(
    options: argparse.Namespace, cluster: Cluster, processes: Processes | None
) -> str | None:
    """Return why this cannot be simulated, the same on every rank; None where it can."""
    if processes is not None and processes.size != cluster.ranks:
        return (
            f"--speeds has {cluster.ranks} ranks, and {processes.size} processes were started: "
            f"start {cluster.ranks}, or the command without a launcher: it computes all ranks"
        )
    for name, changes in (("--slow", options.slow), ("--die", options.die)):
        if any(change.rank >= cluster.ranks for change in changes):
            return f"{name} must be of ranks 0..{cluster.ranks - 1}, as --speeds has them"
    if any(rank >= cluster.ranks for rank in options.fast or ()):
        return f"--fast must be of ranks 0..{cluster.ranks - 1}, as --speeds has them"
    if "slow-only" in options.modes and len({*_classes(options).fast}) == cluster.ranks:
        return "slow-only has no rank to train: all of --speeds are fast; --fast says which are"
    if importlib.util.find_spec("sklearn") is None:
        return "scikit-learn, whose digits are trained on, is not here: pip install scikit-learn"
    if options.die and (others := [mode for mode in options.modes if mode not in OUTLIVE]):
        return f"{others[0]} ends with a rank; --die is of {', '.join(OUTLIVE)}"
    if options.batch < 8 * cluster.ranks:
        return f"--batch must be at least {8 * cluster.ranks}, got {options.batch}"
    return None


def _unwritable(options: argparse.Namespace, processes: Processes | None) -> str | None:
    """Return why rank 0 cannot write the file, before anything is computed; None: it can."""
    reason = ""
    if options.json not in (None, "-") and (processes is None or 0 in processes.here):
        try:
            with open(options.json, "a"):
                pass
        except OSError as error:
            reason = f"{error.filename} cannot be written: {error.strerror}"
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
        losses=any(mode in OF_CLASSES for mode in options.modes),
        classes=_classes(options),
        processes=processes,
    )


def _classes(options: argparse.Namespace) -> Classes:
    fastest = max(options.speeds)
    found = [rank for rank, speed in enumerate(options.speeds) if speed == fastest]
    return Classes(
        options.fast or found, options.fast_overhead, {**Classes().sizes, **options.sizes}
    )


def _json(records: Sequence[Record], setting: Setting) -> str:
    said = {
        "simulated": True,
        "cluster": {
            **dataclasses.asdict(setting.cluster),
            "link": setting.cluster.link._asdict(),
        },
        "reduce_seconds": setting.reduce_seconds,
        "dense_reduce_seconds": setting.dense_seconds,
        "records": [_as_json(record) for record in records],
    }
    return json.dumps(said, indent=1)


def _as_json(record: Record) -> dict[str, Any]:
    """Return the fields; JSON knows no NaN, so a loss that is not finite is null there."""
    loss = [(second, value if math.isfinite(value) else None) for second, value in record.loss]
    return {**dataclasses.asdict(record), "loss": loss}
