"""Status: what a rank does now, from its record."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ...telemetry.lines import path_of
from ...telemetry.reading import RankRecord, Run, Step
from ...telemetry.step_report import PARTS, batch, density, parts

RECENT: Final = 50  # steps that figures are means of
SILENT_SECONDS: Final = 10.0


@dataclasses.dataclass(frozen=True)
class Status:
    """What a rank does now; figures are means of its last steps, None where there is none.

    They are of steps of the rank's own optimizer, also where several are recorded as one. None are
    of what the run went on from: that may have been on other machines.

    state:      "running", "silent" (for how long: silent_seconds), or how it ended.
    failed:     whether it ended out of order.
    sent_bytes: a step.
    density:    the share of the values that it sends.
    straggler_score: how fast it computes beside the fastest rank, 1.
    link:       that is emulated, in words; "": step times are of the links that there are.
    values:     what its script logged last; None for what was not finite.
    """

    rank: int
    host: str
    state: str
    failed: bool
    silent_seconds: float
    step: int | None
    steps_per_second: float | None
    step_seconds: dict[str, float] | None
    sent_bytes: float | None
    density: float | None
    samples: int | None
    straggler_score: float | None
    residual_norm: float | None
    skipped: int
    values: dict[str, float | None]
    link: str = ""


def status_of(run: Run, folder: Path, now: Callable[[], float] = time.time) -> list[Status]:
    """Return the status of each rank."""
    return [_status(rank, _silent_seconds(folder, rank.rank, now())) for rank in run.ranks]


def _silent_seconds(folder: Path, rank: int, now: float) -> float:
    return max(0.0, now - path_of(folder, rank).stat().st_mtime)


def _longest_pause(rank: RankRecord, recent: Sequence[Step]) -> float:
    """Return the most seconds between two lines, where only some steps are written, too."""
    steps = [step.report.compute_seconds + step.report.synchronize_seconds for step in recent]
    if len(recent) == 1:
        return steps[0] * int(rank.begin.get("every", 1))  # earlier versions did not say
    pauses = [later.seconds - step.seconds for step, later in itertools.pairwise(recent)]
    return max([*steps, *pauses], default=0.0)


def _status(rank: RankRecord, silent_seconds: float) -> Status:
    recent = rank.steps[rank.earlier :][-RECENT:]  # without the time between two attempts
    last = recent[-1].report if recent else None
    # The first one has measured the links, too.
    reports = [step.report for step in recent[1:] or recent]
    own = sum(report.local_steps for report in reports) or len(reports)
    means = None
    if reports:
        found = [parts(report) for report in reports]
        means = {part: sum(each[part] for each in found) / own for part in PARTS}
    seconds = recent[-1].seconds - recent[0].seconds if len(recent) > 1 else 0.0
    values: dict[str, float | None] = {}
    for note in rank.values:
        values |= note.content
    silent_after_seconds = max(SILENT_SECONDS, 2 * _longest_pause(rank, recent))
    state = "silent" if silent_seconds > silent_after_seconds else "running"
    return Status(
        rank=rank.rank,
        host=rank.begin["host"],
        state=rank.end if rank.end is not None else state,
        failed=rank.end is not None and not rank.in_order,
        silent_seconds=round(silent_seconds, 1),
        step=last.step if last else None,
        steps_per_second=(recent[-1].report.step - recent[0].report.step) / seconds
        if seconds
        else None,
        step_seconds=means,
        sent_bytes=sum(each.sent_bytes for each in reports) / own if reports else None,
        density=next((share for each in reversed(reports) if (share := density(each))), None),
        samples=next((round(size) for each in reversed(reports) if (size := batch(each))), None),
        straggler_score=rank.scores[-1].content["score"] if rank.scores else None,
        residual_norm=rank.residuals[-1].content["norm"] if rank.residuals else None,
        skipped=sum(step.report.skipped for step in rank.steps),
        values=values,
        link=rank.begin.get("link", ""),
    )
