"""`gtopk bench optimizer` as people see it: alone, or on all ranks of a launcher."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

import torch

from ....runtime.world import world
from ...arguments import as_argument, output_file, share
from ..gloo import open_gloo, own_host
from ..networks import NETWORKS
from ..progress import silent, tell
from ..scaling.compute import real, shapes
from ..scaling.layers import SHAPES
from ..words import add_words, one_of
from .measure import PLAIN, Record, measure, usual, ways


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk bench optimizer",
        description="Time training steps of a plain optimizer and of distributed ones, in turn in "
        "one run. Alone, it shows what DistributedOptimizer costs; started on several ranks "
        "(mpirun -n 4 gtopk bench optimizer), how much of the exchange backward hides.",
        epilog="example:\n  mpirun -n 4 gtopk bench optimizer --json optimizer.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument(
        "--model",
        choices=[*NETWORKS, *SHAPES],
        default="resnet20",
        help="a network, or shapes whose gradients cost a copy and nothing else; default: "
        "%(default)s",
    )
    described.add_argument(
        "--batch", type=int, default=32, help="of a network; default: %(default)s"
    )
    add_words(
        described,
        "--ways",
        one_of(ways(0.5)),
        metavar="WAY",
        help=f"of {', '.join(ways(0.5))}; plain is always there; default: {', '.join(usual(1))}, "
        f"and on several ranks {', '.join(usual(2)[len(usual(1)) :])}",
    )
    described.add_argument(
        "--density", type=as_argument(share), default=0.001, help="default: %(default)s"
    )
    described.add_argument("--rounds", type=int, default=20, help="timed; default: %(default)s")
    described.add_argument(
        "--json", type=as_argument(output_file), help="file to write the records to"
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    for name in ("batch", "rounds"):
        if getattr(options, name) < 1:
            return _refuse(f"--{name} must be at least 1, got {getattr(options, name)}")
    torch.set_num_threads(1)
    world.init()
    here = world.current()
    names = dict.fromkeys([PLAIN, *(options.ways or usual(here.size))])
    group = None
    if any(name.startswith("ddp") for name in names):
        master = here.engine.submit("bench.gloo", [], lambda t, flags: own_host(t)).wait()
        group = open_gloo(master)
    known = ways(options.density, group)
    compute = (
        shapes(options.model, here.rank)
        if options.model in SHAPES
        else real(options.model, options.batch, here.rank)
    )
    records = measure(
        compute,
        {name: known[name] for name in names},
        options.rounds,
        tell if here.rank == 0 else silent,
    )
    if here.rank == 0:
        facts = {
            "model": options.model,
            "batch": options.batch,
            "density": options.density,
            "ranks": here.size,
            "transport": here.transport.name,
            "threads": torch.get_num_threads(),
            "load": round(os.getloadavg()[0], 1),
        }
        print(", ".join(f"{name}: {value}" for name, value in facts.items()))
        print(table(records))
        if options.json:
            content = {**facts, "records": [dataclasses.asdict(each) for each in records]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
            print(f"written to {options.json}")
    world.shutdown()
    return 0


def table(records: Sequence[Record]) -> str:
    """Return the records as lines of text."""
    lines = [
        f"{'':14} {'step':>10} {'above plain, ms (quartiles)':>31} {'over plain':>11} "
        f"{'CPU over':>9} {'engine':>9} {'hidden':>7} {'buckets':>8}"
    ]
    for each in records:
        hidden = "" if each.hidden_share is None else f"{each.hidden_share:.0%}"
        lines.append(
            f"{each.name:14} {1e3 * each.step_seconds:7.1f} ms "
            f"{_spread(each.over_plain_seconds, each.quartiles):>31} {each.over_plain:+11.1%} "
            f"{each.cpu_over_plain:+9.1%} {1e3 * each.working_seconds:6.1f} ms {hidden:>7} "
            f"{each.buckets:8}"
        )
    return "\n".join(lines)


def _spread(median: float, quartiles: tuple[float, float]) -> str:
    low, high = quartiles
    return f"{1e3 * median:+.1f} ({1e3 * low:+.1f} to {1e3 * high:+.1f})"


def _refuse(reason: str) -> int:
    print(f"gtopk bench optimizer: {reason}", file=sys.stderr)
    return 2
