"""Series: the lines that are drawn of a run, thinned to as many points as a plot can show.

A recorded step may be something else than a step of all ranks; `covered` has the words for it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from ...telemetry.reading import Note, RankRecord, Run, Step, by_interest
from ...telemetry.step_report import PARTS, parts

MEANINGS: Final[Mapping[str, str]] = {
    "round": "A round, the step of this mode, is the micro-batches that a rank adds up while the "
    "round before is reduced, and its own reduction, which is to be over when the next round is. ",
    "outer step": "An outer step is the steps that a rank has made by itself, and the exchange of "
    "what they have changed. ",
    "mega-batch": "A mega-batch is the batches that a rank has taken while there were any, a local "
    "step with each, and the merge of all ranks' replicas. ",
    "period": "A period is what a worker has done in a quarter of a second, with no less than a "
    "batch, or in the rest of an epoch. ",
}
WAITS: Final[Mapping[str, str]] = {
    "round": "wait is for the other ranks to be ready, and, where nothing is left to compute, for "
    "the update",
    "mega-batch": "wait is to be told the next samples, for slower ranks, and for the merge's turn",
    "period": "wait is for the other workers to end their epoch",
}
ALONE: Final = ("mega-batch", "period")  # of which each rank makes as many as it can


def several(covers: str, count: int = 2) -> str:
    """Return the word for so many of them."""
    if count == 1:
        return covers
    return f"{covers}{'es' if covers.endswith('ch') else 's'}"


def a(covers: str) -> str:
    """Return the word with its article."""
    return f"{'an' if covers[0] in 'aeiou' else 'a'} {covers}"


Place: TypeAlias = Callable[[Note], float]
BINS: Final = 120  # points of a line
_SETTLING: Final = 2  # first steps, which plan and calibrate


class Point(NamedTuple):
    """A place on the x axis: the mean of what was found there, the least and the most."""

    x: float
    mean: float
    low: float
    high: float


def binned(pairs: Iterable[tuple[float, float | None]]) -> list[Point]:
    """Return (x, y) pairs as at most BINS points; a y of None is left out."""
    found = sorted((x, y) for x, y in pairs if y is not None and math.isfinite(y))
    if not found:
        return []
    first, last = found[0][0], found[-1][0]
    width = (last - first) / BINS or 1.0
    bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for x, y in found:
        bins[min(BINS - 1, int((x - first) / width))].append((x, y))
    points = []
    for _, inside in sorted(bins.items()):
        values = [y for _, y in inside]
        middle = statistics.fmean(x for x, _ in inside)
        points.append(Point(middle, statistics.fmean(values), min(values), max(values)))
    return points


def of_steps(run: Run, value: Callable[[Step], float | None]) -> list[Point]:
    """Return a value of every rank's steps, over what `over` says."""
    return binned((place(run, step), value(step)) for rank in run.ranks for step in rank.steps)


def of_notes(run: Run, notes: Iterable[Note], name: str) -> list[Point]:
    """Return a value that ranks noted, over what `over` says."""
    return binned((place(run, note), note.content[name]) for note in notes)


def over(run: Run) -> str:
    """Return what shows side by side what ranks did at once: "steps", or "time"."""
    return "time" if steps_alone(run) else "steps"


def steps_alone(run: Run) -> bool:
    """Tell whether each rank counts its steps by itself, so that they go by at different paces."""
    return covers(run) in ALONE


def place(run: Run, of: Step | Note) -> float:
    """Return where something that a rank wrote lies over what `over` says."""
    if steps_alone(run):
        return of.seconds
    return of.step if isinstance(of, Note) else of.report.step


def value_names(run: Run) -> list[str]:
    """Return what the script has logged, in the order that it is shown in."""
    return by_interest(
        {name for rank in run.ranks for note in rank.values for name in note.content}
    )


def axes(run: Run) -> dict[str, Place]:
    """Return what something noted lies over: "steps", "time" or "bytes" of a rank on average."""
    sent = _sent_by(run)
    return {
        "steps": lambda note: note.step,
        "time": lambda note: note.seconds,
        "bytes": lambda note: sent(note.seconds),
    }


def logged(run: Run, name: str, place_of: Place) -> list[Point]:
    """Return what was logged by this name, over one of `axes`."""
    notes = [note for rank in run.ranks for note in rank.values if name in note.content]
    return binned((place_of(note), note.content[name]) for note in notes)


def _sent_by(run: Run) -> Callable[[float], float]:
    """Return what tells the bytes that a rank has sent by a time: means over those there were."""
    begun = sorted(rank.began_seconds for rank in run.ranks)
    sent: list[tuple[float, float]] = []
    for rank in run.ranks:
        before = 0
        for step in rank.steps:
            ranks = max(1, bisect.bisect_right(begun, step.seconds))  # a clock may have gone back
            sent.append((step.seconds, (step.bytes_so_far - before) / ranks))
            before = step.bytes_so_far
    sent.sort()
    times = [seconds for seconds, _ in sent]
    totals = [0.0, *itertools.accumulate(each for _, each in sent)]
    return lambda seconds: totals[bisect.bisect_right(times, seconds)]


def settled(rank: RankRecord) -> Sequence[Step]:
    """Return a rank's steps without those that take longer, the first ones of each attempt.

    Where most are such, all.
    """
    first = {place + after for place in rank.begins for after in range(_SETTLING)}
    kept = [step for place, step in enumerate(rank.steps) if place not in first]
    return kept if 2 * len(kept) > len(rank.steps) else rank.steps


def mean_parts(steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean seconds of a step, by part; they add up to the mean step."""
    found = [parts(step.report) for step in steps]
    return {part: statistics.fmean(each[part] for each in found) for part in PARTS}


def parts_over_steps(run: Run) -> list[tuple[float, dict[str, float]]]:
    """Return (step, seconds by part), means over ranks and neighbouring steps."""
    steps = [step for rank in run.ranks for step in settled(rank)]
    if not steps:
        return []
    first = min(step.report.step for step in steps)
    last = max(step.report.step for step in steps)
    width = (last - first + 1) / min(BINS, last - first + 1)
    bins: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        bins[int((step.report.step - first) / width)].append(step)
    return [
        (statistics.fmean(step.report.step for step in inside), mean_parts(inside))
        for _, inside in sorted(bins.items())
    ]


def parts_over_time(run: Run) -> list[tuple[float, dict[str, float]]]:
    """Return (seconds, share of the ranks' time by part), of neighbouring steps together."""
    steps = [step for rank in run.ranks for step in settled(rank)]
    if not steps:
        return []
    first, last = min(s.seconds for s in steps), max(s.seconds for s in steps)
    count = max(1, min(BINS, len(steps) // (2 * len(run.ranks))))  # two of each rank, or so
    width = (last - first) / count or 1.0
    bins: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        bins[min(count - 1, int((step.seconds - first) / width))].append(step)
    found = []
    for _, inside in sorted(bins.items()):
        means = mean_parts(inside)
        if total := sum(means.values()):
            shares = {part: seconds / total for part, seconds in means.items()}
            found.append((statistics.fmean(step.seconds for step in inside), shares))
    return found


def covers(run: Run) -> str:
    """Return what a recorded step of this run is: what the last ones cover; see `StepReport`."""
    return next((rank.steps[-1].report.covers for rank in run.ranks if rank.steps), "step")


def is_of_several(run: Run) -> bool:
    """Tell whether what is recorded as a step may be several of a rank's optimizer."""
    return covers(run) not in ("step", "round")


def values(run: Run) -> int:
    """Return how many values are exchanged at a time; 0 where none were.

    Of a period, in which there may have been several merges, each is a bucket of all values.
    """
    reports = (step.report for rank in run.ranks for step in rank.steps)
    return max(
        (
            each.elements // max(each.buckets, 1) if each.covers == "period" else each.elements
            for each in reports
        ),
        default=0,
    )


def utilisation(seconds: Mapping[str, float]) -> float:
    """Return the share of the time that a rank computed; seconds: by part."""
    total = sum(seconds.values())
    return seconds["compute"] / total if total else 0.0


def bits_per_entry(step: Step) -> float | None:
    """Return what an entry took in the messages a rank wrote, headers included."""
    report = step.report
    return 8 * report.coded_bytes / report.coded_entries if report.coded_entries else None
