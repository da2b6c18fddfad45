"""Report: the results as a table in the terminal, or as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....units import bandwidth_text, bytes_text, count_text, seconds_text
from .record import Record, Results

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
    """Return a case in words."""
    ranks, length, density, distribution = case
    return f"{ranks} ranks, n = {count_text(length)}, density {density:g}, {distribution} picks"


def median(record: Record) -> float:
    return record["seconds"]["median"]


def times_reference(record: Record, rows: Sequence[Record]) -> float | None:
    """Return how many times the reference's time a contender takes."""
    reference = next((row for row in rows if row["reference"]), None)
    return median(record) / median(reference) if reference else None


def facts(results: Results) -> list[str]:
    """Return what was run, and where, in lines."""
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
    """Return the results as people read them in a terminal."""
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
