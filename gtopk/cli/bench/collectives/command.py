"""`gtopk bench collectives` as people call it: alone, or on every rank of a launcher."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from collectives.transports import Transport, local_world, run_ranks
from collectives.wire.indices import INDEX_CODES
from collectives.wire.values import VALUE_CODES

from ....runtime.launch import carried_by, launched_by
from ...arguments import (
    above_zero,
    as_argument,
    from_zero,
    number_in,
    output_file,
    share,
    whole_number,
)
from ..harness import (
    TIMEOUT_SECONDS,
    add_words,
    bench_parser,
    on_launched_rank,
    one_of,
    refuse,
    write_json,
)
from .cases import DISTRIBUTIONS, Results, checked
from .contenders import BASELINES, KNOWN, parse, spelled
from .report import markdown, picture, table
from .run import Plan, run

TRANSPORTS = ("mpi", "torch.distributed", "local")


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = bench_parser(
        "collectives",
        "Time every reduction, the baselines and the model. Start it on the ranks to "
        "measure (mpirun -n 4 gtopk bench collectives), or without a launcher on threads.",
        launched=True,
    )
    add = described.add_argument
    add(
        "--transport",
        choices=TRANSPORTS,
        help="default: the one that training would use; without a launcher, local",
    )
    words = functools.partial(add_words, described)
    words("--ranks", whole_number, metavar="N", help="subsets to measure; default: all ranks")
    words("--lengths", whole_number, [1_000_000], metavar="N", help="n; default: 1000000")
    words("--densities", share, [0.001], metavar="D", help="k / n; default: 0.001")
    picks = f"from {', '.join(DISTRIBUTIONS)}; default: uniform"
    words("--picks", one_of(DISTRIBUTIONS), ["uniform"], help=picks)
    words(
        "--algorithms",
        known_algorithm,
        list(KNOWN),
        may_be_none=True,
        help=f"from {', '.join(KNOWN)}; with options such as gtopk:growth=2.0 or "
        "shards:period=4,bits=3; default: all",
    )
    words(
        "--baselines",
        one_of(BASELINES),
        list(BASELINES),
        may_be_none=True,
        help=f"from {', '.join(BASELINES)}; default: all",
    )
    words(
        "--formats",
        known_format,
        ["exact"],
        help=f"a code of values ({', '.join(VALUE_CODES)}) with the code of indices that the model "
        f"picks, or both, such as packed+bf16 (indices: {', '.join(INDEX_CODES)}); default: exact",
    )
    positive, natural = as_argument(above_zero), as_argument(whole_number)
    add("--rounds", type=natural, default=9)
    add("--budget-seconds", type=positive, default=20.0, help="limit per contender and case")
    add("--bandwidth", type=positive, help="bits per second for the model; default: measured here")
    add(
        "--latency",
        type=as_argument(number_in("[0, inf)")),
        help="seconds for the model; default: measured here",
    )
    add(
        "--shared-cores",
        type=natural,
        help="cores of all ranks together; default: as found here",
    )
    add(
        "--interface",
        type=as_argument(known_interface),
        help="network interface whose sent bytes to record, such as eth0",
    )
    add("--seed", type=as_argument(from_zero), default=0)
    add("--plot", type=as_argument(output_file), help="SVG to write; default: next to the JSON")
    printed = "measure nothing, print these JSON files' tables"
    words("--markdown", Path, metavar="FILE", help=printed)
    return described


def known_algorithm(word: str) -> str:
    """Return the name of an algorithm, with its options; ValueError for what is none."""
    parse(word)
    return word


def known_format(word: str) -> str:
    """Return the name of a format, or of its code of values; ValueError for what is none."""
    spelled(word)
    return word


def known_interface(word: str) -> str:
    """Return the name of a network interface that there is; ValueError for another."""
    names = [name for _, name in socket.if_nameindex()]
    if word not in names:
        raise ValueError(f"must be one of {', '.join(names)} on this host, got {word!r}")
    return word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        if options.markdown:
            print(markdown([read(path) for path in options.markdown]))
            return 0
    except (OSError, ValueError) as error:
        return refuse("collectives", error)
    plan = plan_of(options, given)
    if (options.transport or carried_by(launched_by())) == "local":
        size = max(plan.ranks or (4,))
        found = run_ranks(local_world(size, TIMEOUT_SECONDS), lambda t: run(plan, t))
        deliver(found[0], options)
        return 0

    def measured(transport: Transport) -> None:
        results = run(plan, transport)
        if transport.rank == 0:
            deliver(results, options)
        transport.leave("the benchmark is done")

    return on_launched_rank(measured, options.transport)


def plan_of(options: argparse.Namespace, given: Sequence[str]) -> Plan:
    return Plan(
        command=shlex.join(["gtopk", "bench", "collectives", *given]),
        ranks=tuple(options.ranks or ()),
        lengths=tuple(options.lengths),
        densities=tuple(options.densities),
        distributions=tuple(options.picks),
        algorithms=tuple(options.algorithms),
        baselines=tuple(options.baselines),
        formats=tuple(options.formats),
        rounds=options.rounds,
        budget_seconds=options.budget_seconds,
        bandwidth=options.bandwidth,
        latency=options.latency,
        shared_cores=options.shared_cores,
        interface=options.interface,
        seed=options.seed,
    )


def deliver(results: Results, options: argparse.Namespace) -> None:
    """Print the table; write the JSON and the picture."""
    print(table(results), flush=True)
    write_json(results, options.json)
    plot = options.plot or (options.json and options.json.with_suffix(".svg"))
    if plot:
        plot.write_text(picture(results), encoding="utf-8")


def read(path: Path) -> Results:
    """Return what a JSON file holds; raise OSError or ValueError, which name it."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return checked(results, str(path))


if __name__ == "__main__":
    sys.exit(main())
