"""Show simulated runs: as text of 80 columns, or as a page with plots that needs no other file."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from ...units import count_text, digits, seconds_text
from ..charts import Axis, drawing, frame, horizontal, line, text, vertical
from ..charts import page as shared_page
from .modes import DENSE
from .setting import Record, Setting

TITLE = "Adaptive batches, simulated"


def page(records: Sequence[Record], lines: Sequence[str]) -> str:
    """Return the page: the text of the comparison, and plots of its first seed."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    first = [record for record in records if record.seed == records[0].seed]
    sizes = "".join(
        f"<figure><h3>Samples of each rank and step: {escape(record.mode)}</h3>"
        f"{sizes_over_time(record)}</figure>"
        for record in first
        if record.mode in ("balanced", "abs", "adaptive-sgd")
    )
    return shared_page(
        TITLE,
        style,
        f"""<h1>{TITLE}</h1>
<figure><pre>{escape(chr(10).join(lines))}</pre></figure>
<h2>Plots</h2>
<div class="plots">
<figure><h3>Test accuracy over simulated seconds</h3>{accuracy_over_time(first)}</figure>
<figure><h3>Share of the simulated time that ranks compute</h3>{utilisation(first)}</figure>
{sizes}
</div>""",
    )


def accuracy_over_time(records: Sequence[Record]) -> str:
    """Draw one line per mode."""
    reached = [accuracy for record in records for _, accuracy in record.accuracy]
    x = horizontal(0.0, max(record.seconds for record in records))
    y = vertical(min(reached), 1.0)
    lines = [
        series(place, record.mode, [(x.place(s), y.place(a)) for s, a in record.accuracy])
        for place, record in enumerate(records)
    ]
    ticks = {value: f"{100 * value:.0f} %" for value in y.ticks()}
    axes = frame(x, y, seconds_ticks(x), ticks, ("simulated seconds", "test accuracy"))
    return drawing("Test accuracy over simulated seconds, one line per mode", [axes, *lines])


def sizes_over_time(record: Record) -> str:
    """Draw one line per rank."""
    x = horizontal(0.0, record.seconds)
    y = vertical(0.0, max(max(sizes) for _, sizes in record.sizes))
    lines = [
        series(
            rank,
            f"rank {rank}",
            [(x.place(s), y.place(sizes[rank])) for s, sizes in record.sizes],
        )
        for rank in range(len(record.busy))
    ]
    ticks = {value: digits(value) for value in y.ticks()}
    axes = frame(x, y, seconds_ticks(x), ticks, ("simulated seconds", "samples"))
    return drawing(f"Samples of each rank over simulated seconds, {record.mode}", [axes, *lines])


def utilisation(records: Sequence[Record]) -> str:
    """Draw a bar for each rank of each mode."""
    rows, top = [], 0
    for record in records:
        rows.append(text((0, top + 14), record.mode, "label"))
        for rank, busy in enumerate(record.busy):
            width = 370 * busy / record.seconds
            below = top + 22 + 14 * rank
            rows.append(
                f'<rect class="bar series-{rank % 6}" x="0" y="{below}" width="{width:.1f}" '
                'height="11"/>'
            )
            share = f"rank {rank}: {100 * busy / record.seconds:.0f} %"
            rows.append(text((width + 6, below + 9), share, "tick"))
        top += 36 + 14 * len(record.busy)
    return drawing("Share of time computing, of each rank and mode", rows, height=top)


def series(place: int, name: str, points: Sequence[tuple[float, float]]) -> str:
    """Draw a line with its name at its end."""
    x, y = points[-1]
    label = text((x - 4, y - 5), name, "label end")
    return f'<g class="series-{place % 6}">{line(points)}{label}</g>'


def seconds_ticks(axis: Axis) -> dict[float, str]:
    return {value: f"{value:g}" for value in axis.ticks()}


_CLASS_HEADINGS = ("mode", "loss", "to common", "slow's updates", "used: slow", "fast", "stale")
NOTES: Final = (
    "loss: of all training samples, at the end. to common: simulated seconds to the loss that all "
    "modes reach, seed by seed. slow's updates: the slow class's share of them. used: samples "
    "computed, of what the class could compute in batches of its largest size. stale: others' "
    "updates that a gradient is old."
)


def render_classes(records: Sequence[Record], setting: Setting) -> list[list[str]]:
    """Return the rows of a table, medians over the seeds; none where no mode has classes."""
    if not any(record.used for record in records):
        return []
    common = {
        seed: max(
            (
                record.loss[-1][1]
                for record in records
                if record.loss and record.seed == seed and math.isfinite(record.loss[-1][1])
            ),
            default=-math.inf,  # which no mode reaches
        )
        for seed in {record.seed for record in records}
    }
    modes = list(dict.fromkeys(record.mode for record in records if record.loss))
    rows = [list(_CLASS_HEADINGS)]
    for mode in modes:
        runs = [record for record in records if record.mode == mode]
        reached = [run.seconds_to_loss(common[run.seed]) for run in runs]
        seconds = [second for second in reached if second is not None]
        rows.append(
            [
                mode,
                f"{statistics.median(run.loss[-1][1] for run in runs):.4f}",
                seconds_text(statistics.median(seconds))
                if len(seconds) == len(runs)
                else "not reached",
                *_of_classes(runs, setting),
            ]
        )
    return rows


def _of_classes(runs: Sequence[Record], setting: Setting) -> list[str]:
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
    """Return the lines: what was simulated, and a row for each mode, medians over the seeds."""
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
    whole = [mode for mode in modes if mode in DENSE]
    if setting.density is not None and whole:
        dense = f", dense, as in {', '.join(whole)}, {seconds_text(setting.dense_seconds)}"
    beside = ""
    if setting.overlap:
        beside = f", beside {100 * setting.overlap:g} % of a synchronous step's computation"
    intro = (
        f"Simulated, not measured: {cluster.ranks} ranks of {speeds} samples/s, overhead "
        f"{seconds_text(cluster.overhead_seconds)}, noise {cluster.noise:g}{slower}; an "
        f"exchange of {count_text(setting.task.length)} values by {method} takes "
        f"{seconds_text(setting.reduce_seconds)}{dense}{beside}. Batch {setting.global_batch}, "
        f"learning rate {setting.learning_rate:g}, momentum {setting.momentum:g}, "
        f"{setting.epochs} epochs, {seeds} seed{'s' * (seeds > 1)}. "
        f"Gradients, residuals and collectives are real."
    )
    by_mode = {mode: [r for r in records if r.mode == mode] for mode in modes}
    base = _median([record.samples_per_second for record in by_mode[modes[0]]])
    rows = [_HEADINGS, *(_row(mode, runs, base, target) for mode, runs in by_mode.items())]
    notes = (
        "busy: mean share of the time that ranks compute. least: of the rank that computes least, "
        "of the time off the wire; of abs, of all time. accuracy: median (lowest-highest). to "
        f"target: simulated seconds to {100 * target:g} %."
    )
    lines = [*textwrap.wrap(intro, 80), "", *aligned(rows), "", *textwrap.wrap(notes, 80)]
    skipped = {mode: sum(run.skipped for run in runs) for mode, runs in by_mode.items()}
    if any(skipped.values()):
        lines += ["", *textwrap.wrap(_left_out(skipped), 80)]
    if of_classes := render_classes(records, setting):
        lines += ["", *aligned(of_classes), "", *textwrap.wrap(NOTES, 80)]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _left_out(skipped: Mapping[str, int]) -> str:
    """Report values that were not finite, as in a diverging training."""
    times = (f"{mode} {count_text(n)} time{'s' * (n > 1)}" for mode, n in skipped.items() if n)
    return f"Not finite, and left out as in a real run: {', '.join(times)}. Try a smaller --lr."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            word.ljust(width) if column == 0 else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _row(mode: str, runs: Sequence[Record], base: float, target: float) -> tuple[str, ...]:
    speed = _median([run.samples_per_second for run in runs])
    final = [100 * run.final_accuracy for run in runs]
    reached = [run.seconds_to(target) for run in runs]
    spread = f" ({min(final):.1f}-{max(final):.1f})" if len(runs) > 1 else ""
    all_reached = [second for second in reached if second is not None]
    return (
        mode,
        digits(speed),
        f"{speed / base:.2f}x",
        f"{_median([run.utilisation for run in runs]):.3f}",
        f"{_median([run.least_utilisation for run in runs]):.3f}",
        f"{_median(final):.1f}{spread}",
        count_text(_median([float(run.steps) for run in runs])),
        seconds_text(_median(all_reached)) if len(all_reached) == len(runs) else "not reached",
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
