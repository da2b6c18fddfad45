"""`gtopk bench collectives`: compare every algorithm with the baselines and the model, here.

A case is a number of ranks, a length, a density and a distribution of the picks. In each round of a
case every contender runs once, after a barrier; its time is that of the slowest rank.
"""

from __future__ import annotations

import functools
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from collectives.transports import Transport
from collectives.wire.format import INDEX_CODES, VALUE_CODES

from ....units import bandwidth_text, bytes_text, counted, seconds_text
from ...arguments import (
    Command,
    above_zero,
    from_zero,
    number_in,
    share,
    text_stream,
    whole_number,
    write_records,
)
from ...charts import aligned
from ..harness import add_words, bench_parser, on_ranks, one_of
from .cases import DISTRIBUTIONS, Case, Record, Results
from .contenders import BASELINES, KNOWN, formats_of, parse, try_options
from .run import WARM_UP, run


def panels(records: Sequence[Record]) -> dict[Case, list[Record]]:
    """Group the records by case, fastest first.

    A contender that reads every coordinate is measured once per number of ranks and length; its
    record appears in every case with these.
    """
    sparse = [record for record in records if record["selective"]]
    every = [record for record in records if not record["selective"]]
    found: dict[Case, list[Record]] = {}
    for record in sparse or every:
        case = Case(record["ranks"], record["length"], record["density"], record["distribution"])
        found.setdefault(case, []).append(record)
    if sparse:
        for (ranks, length, *_), rows in found.items():
            rows += [r for r in every if (r["ranks"], r["length"]) == (ranks, length)]
    for rows in found.values():
        rows.sort(key=median)
    return found


def median(record: Record) -> float:
    return record["seconds"]["median"]


def times_reference(record: Record, rows: Sequence[Record]) -> float | None:
    """Return a contender's time divided by the reference's; None without a reference."""
    reference = next((row for row in rows if row["reference"]), None)
    return median(record) / median(reference) if reference else None


def facts(results: Results) -> list[str]:
    """Return lines that describe the run and the machines."""
    machine, run = results["machine"], results["run"]
    link = run["link"]
    return [
        f"{machine['started']}, {machine['processor']}, {counted(machine['cores'], 'core')}, load "
        f"{machine['load_before']:g} before and {machine['load_after']:g} after, "
        f"kernels: {machine['kernels']}",
        f"{counted(run['ranks'], 'rank')} on {counted(run['hosts'], 'host')}, {run['transport']} "
        f"transport ({run['library']}), gtopk {machine['gtopk']}, Python {machine['python']}, "
        f"NumPy {machine['numpy']}",
        f"model: {bandwidth_text(link['bits_per_second'])} ({link['bandwidth_from']}), latency "
        f"{seconds_text(link['latency_seconds'])} ({link['latency_from']})",
        f"`{run['command']}`",
    ]


_HEADINGS: Final = (
    *("", "median", "min - max", "wire", "/wire", "/+code", "/gtopk"),
    *("CPU of a rank", "sent by a rank", "messages"),
)


def table(results: Results) -> str:
    """Return the results as text for a terminal."""
    lines = [*facts(results), ""]
    for case, rows in panels(results["records"]).items():
        cells = [_HEADINGS, *(_cells(row, rows) for row in rows)]
        lines += [str(case), *aligned(cells), ""]
    lines += [
        "* the reference for /gtopk. sent: by the rank that sends most; ~ computed as the least",
        "possible, else counted. wire: modelled time of latency and bandwidth alone; /wire:",
        "measured time over it; /+code: the same with encode, decode and merge added.",
    ]
    return "\n".join(lines)


def _cells(row: Record, rows: Sequence[Record]) -> tuple[str, ...]:
    seconds, model = row["seconds"], row["modelled_wire_seconds"]
    over_reference = times_reference(row, rows)
    ratios = row["measured_over_modelled"], row["measured_over_wire_and_code"]
    return (
        f"{'*' if row['reference'] else ' '} {row['contender']}",
        seconds_text(median(row)),
        f"{seconds_text(seconds['min'])} - {seconds_text(seconds['max'])}",
        "-" if model is None else seconds_text(model),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        "-" if over_reference is None else f"{over_reference:.3g}",
        seconds_text(row["cpu_seconds"]["max"]),
        f"{'' if row['counted'] else '~'}{bytes_text(row['sent_bytes']['max'])}",
        f"{row['sent_messages']['max']:.0f}",
    )


CALL: Final = "gtopk bench collectives"


def parser(call: str = CALL) -> Command:
    """Return the argument parser."""
    described = bench_parser(
        call,
        "Time every reduction, the baselines and the model. Start it on the ranks to "
        f"measure (mpirun -n 4 {call}), or without a launcher on threads.",
        launched=True,
    )
    described.option(
        "--transport",
        None,
        None,
        "default: the one that training would use; without a launcher, local",
        choices=("mpi", "torch.distributed", "local"),
    )
    words = functools.partial(add_words, described)
    ranks = "how many ranks take part, for each measurement; default: all"
    words("--ranks", whole_number, metavar="N", help=ranks)
    lengths = "lengths of the vectors; default: 1000000"
    words("--lengths", whole_number, [1_000_000], metavar="N", help=lengths)
    densities = "shares of entries selected; default: 0.001"
    words("--densities", share, [0.001], metavar="D", help=densities)
    picks = f"from {', '.join(DISTRIBUTIONS)}; default: uniform"
    words("--picks", one_of(DISTRIBUTIONS), ["uniform"], help=picks)
    words(
        "--algorithms",
        functools.partial(_accepted_by, parse),
        list(KNOWN),
        may_be_none=True,
        help=f"from {', '.join(KNOWN)}; with options such as gtopk:growth=2.0 or "
        "shards:period=4,bits=3; default: all",
    )
    baselines = f"from {', '.join(BASELINES)}; default: all"
    words("--baselines", one_of(BASELINES), list(BASELINES), may_be_none=True, help=baselines)
    words(
        "--formats",
        functools.partial(_accepted_by, formats_of),
        ["exact"],
        help=f"a code of values ({', '.join(VALUE_CODES)}) with the code of indices that the model "
        f"picks, or both, such as packed+bf16 (indices: {', '.join(INDEX_CODES)}); default: exact",
    )
    option, measured = described.option, "; default: measured here"
    option("--rounds", whole_number, 9, "timed rounds")
    option("--budget-seconds", above_zero, 20.0, "limit per contender and case")
    option("--bandwidth", number_in("[1, 1e18]"), None, f"bits per second for the model{measured}")
    option("--latency", number_in("[0, 1e9]"), None, f"seconds for the model{measured}")
    cores = "cores that all ranks share; default: those found here"
    option("--shared-cores", whole_number, None, cores)
    interface = "network interface whose sent bytes to record, such as eth0"
    here = [name for _, name in socket.if_nameindex()]
    option("--interface", one_of(here), None, interface)
    option("--seed", from_zero, 0, "of the picks")
    return described


def _accepted_by(read: Callable[[str], object], word: str) -> str:
    """Return the word unchanged; raise ValueError if `read` rejects it."""
    read(word)
    return word


def main(arguments: Sequence[str] | None = None, call: str = CALL) -> int:
    """Run the benchmark on this rank and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    grammar = parser(call)
    options = grammar.parse_args(given)
    for words in options.algorithms:
        try:
            try_options(words, min(WARM_UP.length, *options.lengths))
        except (AttributeError, TypeError, ValueError) as error:
            grammar.error(f"argument --algorithms: {words}: {error}")
    # The records contain the command, so that the measurement can be repeated.
    command = f"{call} {shlex.join(given)}"

    def measured(transport: Transport) -> None:
        results = run(options, command, transport)
        if transport.rank == 0:
            print(table(results), file=text_stream(options.json), flush=True)
            write_records(results, options.json)
        # Announce the departure: ranks that were not measured arrive later, and would take this
        # rank for dead.
        transport.leave("the benchmark is done")

    return on_ranks(measured, max(options.ranks or [4]), options.transport)
