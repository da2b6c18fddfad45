"""The command `gtopk bench collectives`, alone or on every rank of a launcher, and its reports.

The results are a table, Markdown for the documentation, or one SVG picture:

8 ranks, n = 25,557,032, density 0.001, uniform picks
gtopk raw+exact    ...|-o-|               52 ms    1.05 x model    the reference
plain-allgather    .........|o--|         121 ms   1.06 x model    2.3 times as long
dense-library      ..............|...o    29 s     2.01 x model    557 times as long

o median of the rounds   --- fastest to slowest   | the model's time
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

from collectives.transports import Transport, local_world, run_ranks
from collectives.wire.indices import INDEX_CODES
from collectives.wire.values import VALUE_CODES

from ....runtime.launch import launched_by, transport_name
from ....units import bandwidth_text, bytes_text, count_text, seconds_text
from ...arguments import (
    above_zero,
    as_argument,
    from_zero,
    number_in,
    output_file,
    share,
    whole_number,
)
from ...charts import Axis, text
from ..harness import (
    TIMEOUT_SECONDS,
    add_words,
    bench_parser,
    on_launched_rank,
    one_of,
    refuse,
    write_json,
)
from .cases import DISTRIBUTIONS, Record, Results, checked
from .contenders import BASELINES, KNOWN, formats_of, parse
from .run import Plan, run

Panel = tuple[int, int, float, str]  # ranks, length, density, distribution


def panels(records: Sequence[Record]) -> dict[Panel, list[Record]]:
    """Return the records by case, the quickest first.

    A contender that looks at every coordinate was measured once for its ranks and length; it is in
    every such case.
    """
    sparse = [record for record in records if record["selective"]]
    every = [record for record in records if not record["selective"]]
    found: dict[Panel, list[Record]] = {}
    for record in sparse or every:
        found.setdefault(panel(record), []).append(record)
    if sparse:
        for (ranks, length, *_), rows in found.items():
            rows += [r for r in every if (r["ranks"], r["length"]) == (ranks, length)]
    for rows in found.values():
        rows.sort(key=median)
    return found


def panel(record: Record) -> Panel:
    return record["ranks"], record["length"], record["density"], record["distribution"]


def title(case: Panel) -> str:
    ranks, length, density, distribution = case
    return f"{ranks} ranks, n = {count_text(length)}, density {density:g}, {distribution} picks"


def median(record: Record) -> float:
    return record["seconds"]["median"]


def times_reference(record: Record, rows: Sequence[Record]) -> float | None:
    """Return how many times the reference's time a contender takes."""
    reference = next((row for row in rows if row["reference"]), None)
    return median(record) / median(reference) if reference else None


def facts(results: Results) -> list[str]:
    """Return lines that describe the run and the machines."""
    machine, run = results["machine"], results["run"]
    link = run["link"]
    hosts = f"{run['hosts']} host{'s' * (run['hosts'] > 1)}"
    return [
        f"{machine['started']}, {machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load_before']:g} before and {machine['load_after']:g} after, "
        f"kernels: {machine['kernels']}",
        f"{run['ranks']} ranks on {hosts}, {run['transport']} transport "
        f"({run['library']}), gtopk {machine['gtopk']}, Python {machine['python']}, "
        f"NumPy {machine['numpy']}",
        f"model: {bandwidth_text(link['bits_per_second'])} ({link['bandwidth_from']}), latency "
        f"{seconds_text(link['latency_seconds'])} ({link['latency_from']})",
        f"`{run['command']}`",
    ]


def table(results: Results) -> str:
    """Return the results as text for a terminal."""
    lines = [*facts(results), ""]
    for case, rows in panels(results["records"]).items():
        width = max(len(row["contender"]) for row in rows)
        lines.append(title(case))
        lines.append(
            f"  {'':{width}}  {'median':>9}  {'min - max':>21}  {'wire':>9}  {'/wire':>6}  "
            f"{'/+code':>6}  {'/gtopk':>7}  {'CPU of a rank':>13}  {'sent by a rank':>14}  messages"
        )
        for row in rows:
            seconds, sent = row["seconds"], row["sent_bytes"]
            between = f"{seconds_text(seconds['min'])} - {seconds_text(seconds['max'])}"
            model = row["modelled_wire_seconds"]
            ratio, against = row["measured_over_modelled"], times_reference(row, rows)
            with_code = row["measured_over_wire_and_code"]
            lines.append(
                f"{'*' if row['reference'] else ' '} {row['contender']:{width}}  "
                f"{seconds_text(median(row)):>9}  {between:>21}  "
                f"{'-' if model is None else seconds_text(model):>9}  "
                f"{'-' if ratio is None else f'{ratio:.2f}':>6}  "
                f"{'-' if with_code is None else f'{with_code:.2f}':>6}  "
                f"{'-' if against is None else f'{against:.3g}':>7}  "
                f"{seconds_text(row['cpu_seconds']['max']):>13}  "
                f"{('' if row['counted'] else '~') + bytes_text(sent['max']):>14}  "
                f"{row['sent_messages']['max']:>8.0f}"
            )
        lines.append("")
    lines.append("* what ratios are told against. ~ reckoned, the least there can be; the rest is")
    lines.append(
        "counted; either way of the rank that sends most. wire: the model's time, latency and"
    )
    lines.append(
        "bandwidth alone; /wire: measured over it; /+code: with encode, decode and merge added."
    )
    return "\n".join(lines)


def markdown(files: Sequence[Results]) -> str:
    """Return several runs as Markdown: a table for each n, density and distribution."""
    return "\n".join(line for results in files for line in _markdown_of(results))


def _markdown_of(results: Results) -> Iterator[str]:
    first, *rest = facts(results)
    yield f"{first}; {'; '.join(rest)}."
    yield ""
    by_table: dict[tuple[int, float, str], dict[int, list[Record]]] = {}
    for (ranks, length, density, distribution), rows in panels(results["records"]).items():
        by_table.setdefault((length, density, distribution), {})[ranks] = rows
    for (length, density, distribution), columns in by_table.items():
        yield f"n = {count_text(length)}, density {density:g}, {distribution} picks (synthetic):"
        yield ""
        yield "| |" + "".join(f" P = {ranks} |" for ranks in columns)
        yield "|---|" + "---|" * len(columns)
        last = columns[max(columns)]
        labels = list(
            dict.fromkeys(row["label"] for rows in (last, *columns.values()) for row in rows)
        )
        for label in labels:
            cells = [_cell(label, rows) for rows in columns.values()]
            yield f"| {label} | " + " | ".join(cells) + " |"
        yield ""


def _cell(label: str, rows: Sequence[Record]) -> str:
    row = next((row for row in rows if row["label"] == label), None)
    if row is None:
        return ""
    seconds, ratio, against = (
        row["seconds"],
        row["measured_over_modelled"],
        times_reference(row, rows),
    )
    words = [seconds_text(median(row))]
    if row["rounds"] > 1:
        words[0] += f" ({seconds_text(seconds['min'])}-{seconds_text(seconds['max'])})"
    if ratio is not None:
        words.append(f"{ratio:.2f}x wire")
    if row["ours"] and row["measured_over_wire_and_code"] is not None:
        words.append(f"{row['measured_over_wire_and_code']:.2f}x with code")
    if row["reference"]:
        words[0] = f"**{words[0]}**"
    elif against is not None:
        words.append(f"{against:.3g}x the time")
    words.append(f"{'' if row['counted'] else '~'}{bytes_text(row['sent_bytes']['max'])}")
    return ", ".join(words)


WIDTH: Final = 1100
LEFT, RIGHT, VALUES = 300, 730, 750  # where times are drawn, and told
ROW, HEAD, AXIS, GAP = 26, 34, 30, 26
TOP: Final = 152

STYLE: Final = """
svg { color-scheme: light dark; --ground: #fff; --text: #1b2026; --muted: #59636e; --rule: #e4e8ec;
  --ours: #0072b2; --baseline: #7a5c00; }
@media (prefers-color-scheme: dark) { svg { --ground: #12161b; --text: #e6eaee; --muted: #9ba6b2;
  --rule: #303943; --ours: #5ab4ee; --baseline: #e0b84c; } }
.ground { fill: var(--ground); }
text { font: 13px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: var(--text); }
text.title { font-size: 20px; font-weight: 650; } text.case { font-weight: 650; font-size: 15px; }
text.tick, text.fact { fill: var(--muted); font-size: 12px; } text.reference { font-weight: 650; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--rule); } .model { stroke: var(--text); stroke-width: 2; }
.ours { --ink: var(--ours); } .baseline { --ink: var(--baseline); }
.range { stroke: var(--ink); stroke-width: 3; opacity: 0.45; } .median { fill: var(--ink); }
.stem { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 1 4; }
"""


def picture(results: Results) -> str:
    """Return the SVG file's text."""
    cases = panels(results["records"])
    axis = _axis(results["records"])
    parts: list[str] = []
    y = TOP
    for case, rows in cases.items():
        parts.append(text((20, y + 14), title(case), "case"))
        y += HEAD
        bottom = y + ROW * len(rows)
        parts += _grid(axis, y, bottom)
        for row in rows:
            parts += _row(row, rows, axis, y + ROW / 2)
            y += ROW
        y += AXIS + GAP
    head = [
        text((20, 34), "Time of a reduction: slowest rank, median of the rounds", "title"),
        *_key(122),
        *(
            text((20, 56 + 17 * i), line.replace("`", ""), "fact")
            for i, line in enumerate(_head(results))
        ),
    ]
    described = "Time of each contender in each case, on a logarithmic axis, beside the model's"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="{escape(described)}"><style>{STYLE}</style>'
        f'<rect class="ground" width="{WIDTH}" height="{y}"/>'
        + "".join([*head, *parts])
        + "</svg>\n"
    )


def _head(results: Results) -> list[str]:
    first, second, model, _ = facts(results)
    return [first, second, model]


def _key(y: float) -> Iterator[str]:
    """Draw the key of the marks."""
    for x, kind, words in (
        (26, "ours", "gtopk's algorithms"),
        (190, "baseline", "baselines"),
    ):
        yield f'<g class="{kind}"><circle class="median" cx="{x}" cy="{y}" r="5.5"/></g>'
        yield text((x + 12, y + 4), words, "fact")
    yield f'<g class="ours"><path class="range" d="M300 {y}h26"/></g>'
    yield text((334, y + 4), "fastest to slowest round", "fact")
    yield f'<path class="model" d="M520 {y - 8}v16"/>'
    yield text((530, y + 4), "the model: latency and bandwidth alone", "fact")


def _axis(records: Sequence[Record]) -> Axis:
    """Return one axis for all cases, so that they compare."""
    times = [time for r in records for time in (r["seconds"]["min"], r["seconds"]["max"])]
    times += [r["modelled_wire_seconds"] for r in records if r["modelled_wire_seconds"]]
    return Axis(min(times) / 1.3, max(times) * 1.3, LEFT, RIGHT, logarithmic=True)


def _grid(axis: Axis, top: float, bottom: float) -> Iterator[str]:
    for value in axis.ticks():
        at = axis.place(value)
        yield f'<path class="grid" d="M{at:.1f} {top:.1f}V{bottom + 5:.1f}"/>'
        yield text((at, bottom + 20), seconds_text(value), "tick middle")


def _row(row: Record, rows: Sequence[Record], axis: Axis, y: float) -> Iterator[str]:
    seconds = row["seconds"]
    at = axis.place(seconds["median"])
    kind = "ours" if row["ours"] else "baseline"
    weight = " reference" if row["reference"] else ""
    yield text((LEFT - 12, y + 4), row["contender"], f"end{weight}")
    yield f'<g class="{kind}"><path class="stem" d="M{LEFT} {y:.1f}H{at:.1f}"/>'
    low, high = axis.place(seconds["min"]), axis.place(seconds["max"])
    yield f'<path class="range" d="M{low:.1f} {y:.1f}H{max(high, low + 0.1):.1f}"/>'
    yield f'<circle class="median" cx="{at:.1f}" cy="{y:.1f}" r="5.5"/></g>'
    words = [(0, seconds_text(median(row)))]
    if row["modelled_wire_seconds"]:
        model = axis.place(row["modelled_wire_seconds"])
        yield f'<path class="model" d="M{model:.1f} {y - 8:.1f}v16"/>'
        words.append((76, f"{row['measured_over_modelled']:.2f} x model"))
    against = times_reference(row, rows)
    if row["reference"]:
        words.append((184, "the reference"))
    elif against is not None:
        words.append((184, _against(against)))
    for offset, word in words:
        yield text((VALUES + offset, y + 4), word, weight.strip() or "value")


def _against(ratio: float) -> str:
    if ratio >= 10:
        return f"{count_text(ratio)} times as long"
    return f"{ratio:.2f} times as long"


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
    words(
        "--ranks",
        whole_number,
        metavar="N",
        help="how many ranks take part, for each measurement; default: all",
    )
    words(
        "--lengths",
        whole_number,
        [1_000_000],
        metavar="N",
        help="lengths of the vectors; default: 1000000",
    )
    words(
        "--densities",
        share,
        [0.001],
        metavar="D",
        help="shares of entries selected; default: 0.001",
    )
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
        help="cores that all ranks share; default: those found here",
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
    """Return the name of an algorithm, with its options; raise ValueError for an unknown one."""
    parse(word)
    return word


def known_format(word: str) -> str:
    """Return the name of a format, or of its value code; raise ValueError for an unknown one."""
    formats_of(word)
    return word


def known_interface(word: str) -> str:
    """Return the name of an existing network interface; raise ValueError for another."""
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
    if (options.transport or transport_name(launched_by())) == "local":
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
    """Return the results in a JSON file; raise OSError or ValueError, which name it."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return checked(results, str(path))


if __name__ == "__main__":
    sys.exit(main())
