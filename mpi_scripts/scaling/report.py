"""Reports step times and efficiencies as a table, as Markdown for the docs, or as an SVG picture.

vgg16, 4 ranks
ssgd            ====<>                  12.1 %   1.0 s
gtopk           =============           41 %     0.3 s     3.4 times ssgd
gtopk-tree      ========= <>            31 %     0.4 s

=== a worker's step alone over the step; <> published
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from gtopk.cli.charts import Axis, text
from gtopk.units import bandwidth_text, bytes_text, count_text, digits, percent_text, seconds_text

from .measure import Record, Results
from .models import PUBLISHED, WORKERS

BASELINE = "ssgd"
# The picture brings its own colours, as no page gives it any.
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


def facts(results: Results) -> list[str]:
    """Return lines that describe the run and the machines."""
    machine = results["machine"]
    compute = (
        f"emulated compute: {results['batch']} samples in the seconds that a published worker took"
        if results["emulated_compute"]
        else f"real compute, batch {results['batch']} a rank"
    )
    given, scale = results["given_bits_per_second"], results["scale"]
    link = f"{bandwidth_text(results['bits_per_second'])} measured"
    if given:
        link = f"set to {bandwidth_text(given)}, {link}"
    if scale != 1.0:
        link += f"; model and link stand for ones {digits(scale)} times as large"
    shared = results["cores"]
    cores = f", all sharing {shared} cores" if shared else ""
    return [
        f"{results['model']}, {count_text(results['elements'])} parameters, {compute}, density "
        f"{results['density']:g}",
        f"{results['ranks']} ranks on {results['hosts']} hosts{cores}; link {link}, latency "
        f"{seconds_text(results['latency_seconds'])}",
        f"{machine['started']}, {machine['processor']}, load {machine['load_before']:g} before and "
        f"{machine['load_after']:g} after; {results['library']}, torch {results['torch']}, gtopk "
        f"{machine['gtopk']}",
        f"`{results['command']}`",
    ]


def over_baseline(record: Record, records: Sequence[Record]) -> float | None:
    """Return how many times S-SGD's speed a contender has."""
    baseline = next((r for r in records if r["contender"] == BASELINE), None)
    if baseline is None:
        return None
    return baseline["seconds"]["median"] / record["seconds"]["median"]


def published_over_baseline(results: Results, contender: str) -> float | None:
    """Return the same of the published figures; None where there is none."""
    published = PUBLISHED.get(results["model"]) if results["emulated_compute"] else None
    if published is None:
        return None
    efficiency, base = (
        published.efficiency(name, results["ranks"]) for name in (contender, BASELINE)
    )
    return efficiency / base if efficiency and base else None


def table(results: Results) -> str:
    """Return the results as text for a terminal."""
    records = results["records"]
    lines = [
        *facts(results),
        "",
        f"  {'':15} {'step':>9}  {'min - max':>21} {'efficiency':>11} {'published':>10} "
        f"{'x ssgd':>7} {'published':>10} {'cores':>6} {'sent by a rank':>15}",
    ]
    for record in records:
        seconds, sent = record["seconds"], record["interface_bytes"]
        between = f"{seconds_text(seconds['min'])} - {seconds_text(seconds['max'])}"
        lines.append(
            f"  {record['contender']:15} {seconds_text(seconds['median']):>9}  {between:>21} "
            f"{percent_text(record['efficiency']):>11} {_percent(record['published']):>10} "
            f"{_times(over_baseline(record, records)):>7} "
            f"{_times(published_over_baseline(results, record['contender'])):>10} "
            f"{record['cpu_share']:>6.0%} {bytes_text(sent['max']) if sent else '-':>15}"
        )
    lines += [
        "",
        "step: median of the slowest rank; efficiency: a worker's step alone over it; cores: the "
        "share of",
        "them that all ranks' processes took; sent: by the rank that sends most, headers included.",
    ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else percent_text(share)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def markdown(runs: Sequence[Results]) -> str:
    """Return several runs as Markdown: a table for each model, with a column for each run."""
    return "\n".join(line for model in by_model(runs).values() for line in _markdown(model))


def by_model(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """Return the runs of each model, those of fewer ranks first."""
    found: dict[str, list[Results]] = {}
    for run in sorted(runs, key=lambda run: run["ranks"]):
        found.setdefault(run["model"], []).append(run)
    return found


def _markdown(runs: Sequence[Results]) -> Iterator[str]:
    what, _, where, _ = facts(runs[0])
    yield f"{what}. {where}."
    yield ""
    for run in runs:
        _, link, _, command = facts(run)
        yield f"- {link}: {command}"
    yield ""
    yield "| |" + "".join(f" P = {run['ranks']} |" for run in runs)
    yield "|---|" + "---|" * len(runs)
    for name in dict.fromkeys(r["contender"] for run in runs for r in run["records"]):
        yield f"| {name} | " + " | ".join(_cell(name, run) for run in runs) + " |"
    yield ""
    yield from _published(runs[0]["model"]) if runs[0]["emulated_compute"] else ()


def _cell(name: str, run: Results) -> str:
    record = next((r for r in run["records"] if r["contender"] == name), None)
    if record is None:
        return ""
    seconds = record["seconds"]
    words = [
        f"{seconds_text(seconds['median'])} ({seconds_text(seconds['min'])}-"
        f"{seconds_text(seconds['max'])})",
        f"{percent_text(record['efficiency'])}",
    ]
    if (over := over_baseline(record, run["records"])) is not None and name != BASELINE:
        words.append(f"{over:.2f}x ssgd")
    words.append(f"cores {record['cpu_share']:.0%}")
    if record["interface_bytes"]:
        words.append(bytes_text(record["interface_bytes"]["max"]))
    return ", ".join(words)


def _published(model: str) -> Iterator[str]:
    """Yield the paper's rows: efficiencies, and how many times S-SGD's speed."""
    published = PUBLISHED[model]
    yield "Published (Shi et al. 2019, 1 Gbit/s, gTop-k as a tree):"
    yield ""
    yield "| |" + "".join(f" P = {ranks} |" for ranks in WORKERS)
    yield "|---|" + "---|" * len(WORKERS)
    for name in published.by_method:
        cells = []
        for ranks in WORKERS:
            efficiency, base = (published.efficiency(n, ranks) for n in (name, BASELINE))
            assert efficiency is not None
            assert base is not None
            over = "" if name == BASELINE else f", {efficiency / base:.2f}x ssgd"
            cells.append(percent_text(efficiency) + over)
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""


WIDTH: Final = 1000
LEFT, RIGHT, VALUES = 150, 620, 640  # x of the bars' begin and end, and of the numbers
ROW, HEAD, AXIS, GAP, TOP = 24, 34, 30, 22, 120

_MORE: Final = """
.bar { fill: var(--ink); opacity: 0.75; }
.published { fill: var(--ground); stroke: var(--text); stroke-width: 1.5; }
"""


def picture(runs: Sequence[Results]) -> str:
    """Return the SVG file's text."""
    axis = Axis(0.0, 1.0, LEFT, RIGHT)
    parts: list[str] = []
    y = TOP
    for model, same in by_model(runs).items():
        for run in same:
            parts.append(text((20, y + 14), f"{model}, {run['ranks']} ranks", "case"))
            y += HEAD
            rows = [r for r in run["records"] if r["contender"] != "alone"]
            parts += _grid(axis, y, y + ROW * len(rows))
            for row in rows:
                parts += _row(row, run["records"], axis, y + ROW / 2)
                y += ROW
            y += AXIS + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="{escape(_DESCRIBED)}"><style>{STYLE}{_MORE}</style>'
        f'<rect class="ground" width="{WIDTH}" height="{y}"/>'
        + "".join([*_head(runs[0]), *parts])
        + "</svg>\n"
    )


_DESCRIBED: Final = "Scaling efficiency of each way to train, by model and number of ranks"


def _head(run: Results) -> Iterator[str]:
    yield text((20, 34), "Scaling efficiency: one worker's step over the step of all", "title")
    compute = "emulated compute, " if run["emulated_compute"] else ""
    yield text((20, 56), f"{compute}{facts(run)[1].partition('; ')[2]}", "fact")
    yield text((20, 73), facts(run)[2], "fact")
    for x, kind, words in ((26, "ours", "gtopk"), (110, "baseline", "others")):
        yield f'<g class="{kind}"><rect class="bar" x="{x - 6}" y="86" width="14" height="12"/></g>'
        yield text((x + 14, 97), words, "fact")
    yield _diamond(206, 92)
    yield text((218, 97), "published: 1 Gbit/s, 2019", "fact")


def _grid(axis: Axis, top: float, bottom: float) -> Iterator[str]:
    for value in axis.ticks():
        at = axis.place(value)
        yield f'<path class="grid" d="M{at:.1f} {top:.1f}V{bottom + 5:.1f}"/>'
        yield text((at, bottom + 20), f"{value:.0%}", "tick middle")


def _row(row: Record, rows: Sequence[Record], axis: Axis, y: float) -> Iterator[str]:
    width = axis.place(row["efficiency"]) - LEFT
    kind = "ours" if row["ours"] else "baseline"
    yield text((LEFT - 12, y + 4), row["contender"], "end")
    yield (
        f'<g class="{kind}"><rect class="bar" x="{LEFT}" y="{y - 7:.1f}" width="{width:.1f}" '
        'height="14"/></g>'
    )
    if row["published"] is not None:
        yield _diamond(axis.place(row["published"]), y)
    words = [(0, percent_text(row["efficiency"])), (80, seconds_text(row["seconds"]["median"]))]
    if (over := over_baseline(row, rows)) is not None:
        words.append((170, f"{over:.2f} times ssgd"))
    for offset, word in words:
        yield text((VALUES + offset, y + 4), word, "value")


def _diamond(x: float, y: float) -> str:
    return f'<path class="published" d="M{x - 6:.1f} {y:.1f}l6-6l6 6l-6 6z"/>'
