"""How fast and slow classes trained one model, beside the synchronous modes, as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from ..units import seconds_text
from .record import Record
from .setting import Setting

_HEADINGS = ("mode", "loss", "to common", "slow's updates", "used: slow", "fast", "stale")
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
    rows = [list(_HEADINGS)]
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
