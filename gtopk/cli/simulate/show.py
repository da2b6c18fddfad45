"""Show simulated runs as text of 80 columns."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from ...units import count_text, digits, seconds_text
from ..charts import aligned
from .modes import DENSE
from .setting import Record, Setting

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
    base = statistics.median([record.samples_per_second for record in by_mode[modes[0]]])
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


def _row(mode: str, runs: Sequence[Record], base: float, target: float) -> tuple[str, ...]:
    speed = statistics.median([run.samples_per_second for run in runs])
    final = [100 * run.final_accuracy for run in runs]
    reached = [run.seconds_to(target) for run in runs]
    spread = f" ({min(final):.1f}-{max(final):.1f})" if len(runs) > 1 else ""
    all_reached = [second for second in reached if second is not None]
    to_target = "not reached"
    if len(all_reached) == len(runs):
        to_target = seconds_text(statistics.median(all_reached))
    return (
        mode,
        digits(speed),
        f"{speed / base:.2f}x",
        f"{statistics.median([run.utilisation for run in runs]):.3f}",
        f"{statistics.median([run.least_utilisation for run in runs]):.3f}",
        f"{statistics.median(final):.1f}{spread}",
        count_text(statistics.median([float(run.steps) for run in runs])),
        to_target,
    )
