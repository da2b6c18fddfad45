"""`gtopk simulate` as people call it."""

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
    above_zero,
    as_argument,
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
from .show import page, render

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


def ranks(text: str) -> list[int]:
    """Return the ranks of "0,2"."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise ValueError(f"must be ranks, as 0,2, got {text!r}")
    return [int(word) for word in text.split(",")]


def dense_or_density(text: str) -> float | None:
    """Return gTop-k's density; None for "dense"."""
    return None if text == "dense" else share(text)


def modes(text: str) -> list[str]:
    """Return the modes of "equal,balanced"."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SIMULATED]:
        raise ValueError(f"must be of {', '.join(SIMULATED)}, got {unknown[0]!r}")
    return list(dict.fromkeys(names))


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk simulate",
        description="Train on a modelled cluster with ranks of different speed: real model, "
        "gradients, residuals and collectives, simulated seconds. Shows which mode of adaptive "
        "batches pays there. Runs all ranks in this process, or one per process of a launcher.",
        epilog="example:\n  gtopk simulate --speeds 400:200:100:100 --html adaptive.html\n"
        "  mpirun -n 4 gtopk simulate --speeds 400:200:100:100",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = described.add_argument
    add(
        "--speeds",
        type=as_argument(speeds),
        default=[400.0, 200.0, 100.0, 100.0],
        help="samples per second of each rank; default: 400:200:100:100",
    )
    add(
        "--overhead",
        type=as_argument(duration),
        default=0.0,
        help="time added per batch; default: none",
    )
    add(
        "--noise",
        type=as_argument(number_in("[0, 10]")),
        default=0.03,
        help="relative noise of a batch's time; default: %(default)s",
    )
    add(
        "--slow",
        type=as_argument(slowdown),
        action="append",
        default=[],
        metavar="RANK:FACTOR@TIME",
        help="slow a rank down, such as 0:4@30s; may be repeated",
    )
    add(
        "--die",
        type=as_argument(death),
        action="append",
        default=[],
        metavar="RANK@TIME",
        help=f"let a rank die, such as 1@30s; for {', '.join(OUTLIVE)}",
    )
    add(
        "--bandwidth",
        type=as_argument(bandwidth),
        default=GIGABIT.bits_per_second,
        help="bandwidth of each rank's link; default: 1gbit",
    )
    add(
        "--latency",
        type=as_argument(duration),
        default=GIGABIT.latency_seconds,
        help=f"latency per message; default: {1e6 * GIGABIT.latency_seconds:g}us",
    )
    add("--exchange", type=as_argument(duration), help="time per step, instead of the link's model")
    add(
        "--overlap",
        type=as_argument(number_in("[0, 1]")),
        default=0.0,
        metavar="SHARE",
        help="share of a batch's time that hides the exchange of synchronous modes; "
        "default: %(default)s",
    )
    add("--model", choices=PARAMETERS, metavar="NAME", help="model whose exchange is modelled")
    add("--task", choices=NETWORKS, default="digits", help="what to train; default: %(default)s")
    add("--epochs", type=as_argument(count), default=20, help="epochs; default: %(default)s")
    add(
        "--evaluate-every",
        type=as_argument(count),
        default=0,
        metavar="SAMPLES",
        help="samples between evaluations; default: an epoch",
    )
    add("--seeds", type=as_argument(count), default=1, help="runs per mode; default: %(default)s")
    add(
        "--batch",
        type=as_argument(count),
        default=256,
        help="batch size over all ranks; default: %(default)s",
    )
    add(
        "--micro-batch",
        type=as_argument(count),
        default=8,
        help="of mode abs; default: %(default)s",
    )
    add(
        "--max-batch",
        type=as_argument(count),
        default=0,
        help="largest batch of mode goodput; default: 8 times --batch",
    )
    add(
        "--mega-batch",
        type=as_argument(count),
        default=0,
        help="samples of mode adaptive-sgd's mega-batch; default: 100 batches",
    )
    add(
        "--fast",
        type=as_argument(ranks),
        metavar="RANKS",
        help="ranks of hogbatch's fast class; default: the fastest",
    )
    add(
        "--fast-overhead",
        type=as_argument(duration),
        metavar="TIME",
        help="time added to each of their batches; default: --overhead",
    )
    add(
        "--sizes",
        type=as_argument(classes_sizes),
        default=Classes().sizes,
        help="batch sizes of hogbatch; default: slow=4:64,fast=32:256",
    )
    add(
        "--interval",
        type=as_argument(count),
        default=5,
        help="steps per window of mode balanced; default: %(default)s",
    )
    add(
        "--lr",
        type=as_argument(above_zero),
        default=0.5,
        help="learning rate; default: %(default)s",
    )
    add(
        "--momentum",
        type=as_argument(number_in("[0, 1)")),
        default=0.0,
        help="SGD's momentum; default: %(default)s",
    )
    add(
        "--density",
        type=as_argument(dense_or_density),
        default=0.05,
        help="share of entries sent, or 'dense'; default: 0.05",
    )
    add(
        "--target",
        type=as_argument(share),
        default=0.9,
        help="accuracy to reach; default: %(default)s",
    )
    add(
        "--modes",
        type=as_argument(modes),
        default=list(DEFAULT),
        help=f"modes to compare, from {','.join(SIMULATED)}; default: {','.join(DEFAULT)}",
    )
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the records as JSON; without FILE: print only them",
    )
    add("--html", metavar="FILE", help="write a page with plots")
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
        if options.html:
            Path(options.html).write_text(page(records, lines), encoding="utf-8")
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
    if options.html and options.html == options.json:
        return f"--json and --html are both {options.html}: name two files"
    if options.batch < 8 * cluster.ranks:
        return f"--batch must be at least {8 * cluster.ranks}, got {options.batch}"
    return None


def _unwritable(options: argparse.Namespace, processes: Processes | None) -> str | None:
    """Return which file rank 0 cannot write, before anything is computed; None: it can."""
    reason = ""
    if processes is None or 0 in processes.here:
        try:
            for name in {options.json, options.html} - {None, "-"}:
                with open(name, "a"):
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
