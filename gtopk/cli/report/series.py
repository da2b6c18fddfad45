"""Series: a run's data as lines, thinned to the number of points that a plot can show.

Also the report's texts: key figures, how ranks ended, the library's messages.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, TypeAlias, TypeVar

from collectives.cost import dense_bytes

from ...telemetry.reading import Note, RankRecord, Run, Step, accuracy_and_loss_first
from ...telemetry.step_report import PARTS, Balance, StepReport, parts
from ...units import (
    bytes_text,
    count_text,
    counted,
    digits,
    duration_text,
    listed,
    percent_text,
    seconds_text,
    with_article,
)
from ..charts import Point, Tile

MEANINGS: Final[Mapping[str, str]] = {
    "round": "A round, the step of this mode, is the micro-batches that a rank adds up while the "
    "round before is reduced, and its own reduction, due by the end of the next round. ",
    "outer step": "An outer step is a rank's local steps, and the exchange of their changes. ",
    "mega-batch": "A mega-batch is the batches that a rank takes until none is left, a local step "
    "with each, and the merge of all ranks' replicas. ",
    "period": "A period is a worker's work in a quarter of a second, at least one batch, or until "
    "the epoch ends. ",
}
WAITS: Final[Mapping[str, str]] = {
    "round": "wait is for the other ranks to be ready, and, where nothing is left to compute, for "
    "the update",
    "mega-batch": "wait is for the next samples, for slower ranks, and for the merge's turn",
    "period": "wait is for the other workers to end their epoch",
}
INDEPENDENT: Final = ("mega-batch", "period")  # ranks make these at their own pace


T = TypeVar("T")
Place: TypeAlias = Callable[[Note], float]
BINS: Final = 120  # maximum number of points on a line
# The first steps plan buckets and measure links.
_SETTLING: Final = 2


def _in_bins(
    items: Sequence[T], place_of: Callable[[T], float], most: int, room: float = 0.0
) -> list[list[T]]:
    """Group neighbouring items into at most `most` bins; room: added after the last place."""
    first, last = min(map(place_of, items)), max(map(place_of, items)) + room
    # If all items are in one place, any width will do.
    width = (last - first) / most or 1.0
    bins: dict[int, list[T]] = defaultdict(list)
    for item in items:
        bins[min(most - 1, int((place_of(item) - first) / width))].append(item)
    return [inside for _, inside in sorted(bins.items())]


def binned(pairs: Iterable[tuple[float, float | None]]) -> list[Point]:
    """Reduce (x, y) pairs to at most BINS points; skip pairs with y None or not finite."""
    found = [(x, y) for x, y in pairs if y is not None and math.isfinite(y)]
    points = []
    for inside in _in_bins(found, lambda pair: pair[0], BINS) if found else ():
        values = [y for _, y in inside]
        middle = statistics.fmean(x for x, _ in inside)
        points.append(Point(middle, statistics.fmean(values), min(values), max(values)))
    return points


def of_steps(run: Run, value: Callable[[Step], float | None]) -> list[Point]:
    """Return a value of every rank's steps as points on the axis `over`."""
    return binned((place(run, step), value(step)) for rank in run.ranks for step in rank.steps)


def of_notes(run: Run, notes: Iterable[Note], name: str) -> list[Point]:
    """Return a value that ranks noted as points on the axis `over`."""
    return binned((place(run, note), note.content[name]) for note in notes)


def over(run: Run) -> str:
    """Return the x axis that aligns simultaneous work of ranks: "steps" or "time"."""
    return "time" if are_steps_independent(run) else "steps"


def are_steps_independent(run: Run) -> bool:
    """Tell whether ranks count steps independently, each at its own pace."""
    return covers(run) in INDEPENDENT


def place(run: Run, of: Step | Note) -> float:
    """Return the position of a rank's step or note on the axis `over`."""
    if are_steps_independent(run):
        return of.seconds
    return of.step if isinstance(of, Note) else of.report.step


def value_names(run: Run) -> list[str]:
    """Return the names of the values that the script logged, in display order."""
    return accuracy_and_loss_first(
        {name for rank in run.ranks for note in rank.values for name in note.content}
    )


def axes(run: Run) -> dict[str, Place]:
    """Return functions from a note to its step, its time, and the mean bytes a rank had sent."""
    sent = _sent_by(run)
    return {
        "steps": lambda note: note.step,
        "time": lambda note: note.seconds,
        "bytes": lambda note: sent(note.seconds),
    }


def logged(run: Run, name: str, place_of: Place) -> list[Point]:
    """Return the values logged under a name, over one of `axes`."""
    notes = [note for rank in run.ranks for note in rank.values if name in note.content]
    return binned((place_of(note), note.content[name]) for note in notes)


def _sent_by(run: Run) -> Callable[[float], float]:
    """Return a function of time: the bytes sent so far, averaged over the ranks started so far."""
    begun = sorted(rank.began_seconds for rank in run.ranks)
    sent: list[tuple[float, float]] = []
    for rank in run.ranks:
        before = 0
        for step in rank.steps:
            # At least 1: if a clock was set back, the step seems to precede its rank's start.
            ranks = max(1, bisect.bisect_right(begun, step.seconds))
            sent.append((step.seconds, (step.bytes_so_far - before) / ranks))
            before = step.bytes_so_far
    sent.sort()
    times = [seconds for seconds, _ in sent]
    totals = [0.0, *itertools.accumulate(each for _, each in sent)]
    return lambda seconds: totals[bisect.bisect_right(times, seconds)]


def settled(rank: RankRecord) -> Sequence[Step]:
    """Return a rank's steps without the first ones of each attempt, which take longer.

    If at least half of the steps are such, return all.
    """
    first = {place + after for place in rank.begins for after in range(_SETTLING)}
    kept = [step for place, step in enumerate(rank.steps) if place not in first]
    return kept if 2 * len(kept) > len(rank.steps) else rank.steps


def _settled_steps(run: Run) -> list[Step]:
    return [step for rank in run.ranks for step in settled(rank)]


def mean_parts(steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean seconds of a step by part; their sum is the mean step."""
    found = [parts(step.report) for step in steps]
    return {part: statistics.fmean(each[part] for each in found) for part in PARTS}


def parts_over_steps(run: Run) -> list[tuple[float, dict[str, float]]]:
    """Return (step, seconds by part), means over ranks and neighbouring steps."""
    steps = _settled_steps(run)
    if not steps:
        return []
    numbers = [step.report.step for step in steps]
    count = min(BINS, max(numbers) - min(numbers) + 1)
    # room=1.0: the last step is as wide as the others. Uneven bins would draw a sawtooth.
    return [
        (statistics.fmean(step.report.step for step in inside), mean_parts(inside))
        for inside in _in_bins(steps, lambda step: step.report.step, count, room=1.0)
    ]


def parts_over_time(run: Run) -> list[tuple[float, dict[str, float]]]:
    """Return (seconds, fraction of the ranks' time by part), over bins of neighbouring steps."""
    steps = _settled_steps(run)
    if not steps:
        return []
    count = max(1, min(BINS, len(steps) // (2 * len(run.ranks))))  # ~2 steps of a rank per bin
    found = []
    for inside in _in_bins(steps, lambda step: step.seconds, count):
        means = mean_parts(inside)
        if total := sum(means.values()):
            shares = {part: seconds / total for part, seconds in means.items()}
            found.append((statistics.fmean(step.seconds for step in inside), shares))
    return found


def covers(run: Run) -> str:
    """Return the kind of this run's recorded steps, taken from a last step; see `StepReport`."""
    return next((rank.steps[-1].report.covers for rank in run.ranks if rank.steps), "step")


def is_of_several(run: Run) -> bool:
    """Tell whether a recorded step may consist of several optimizer steps."""
    return covers(run) not in ("step", "round")


def values(run: Run) -> int:
    """Return the number of exchanged values, of the model or gradient; 0 without steps.

    A period may contain several merges; each counts as a bucket of all values.
    """

    def exchanged(report: StepReport) -> int:
        merges = max(report.buckets, 1) if report.covers == "period" else 1
        return report.model_elements or report.elements // merges

    reports = (step.report for rank in run.ranks for step in rank.steps)
    return max(map(exchanged, reports), default=0)


def utilisation(seconds: Mapping[str, float]) -> float:
    """Return the fraction of the time spent computing; seconds: by part."""
    total = sum(seconds.values())
    return seconds["compute"] / total if total else 0.0


def bits_per_entry(step: Step) -> float | None:
    """Return the bits per entry in a rank's messages, including headers; None without entries."""
    report = step.report
    return 8 * report.coded_bytes / report.coded_entries if report.coded_entries else None


_FEW = 12  # messages shown


def tiles(run: Run) -> Iterator[Tile]:
    """Yield the key figures at the top of the page."""
    names = value_names(run)
    if names:
        yield _last_value(run, names[0])
    if (sent := _sent(run)) is not None:
        yield sent
    if any(rank.steps for rank in run.ranks):
        yield _step(run)
    yield _ranks(run)


def verdict(run: Run) -> str:
    """Return a text on whether compression has paid; "" if the record does not show it."""
    rank, balance = run.first, Balance()
    every, counted = int(rank.begin.get("every", 1)), rank.from_step
    for step in rank.steps:
        report = step.report
        # A line stands for all steps since the previous line, not always `every`: the first, the
        # last and skipped steps are always written.
        since = round((report.step + 1 - counted) / max(1, report.local_steps))
        balance.note(report, max(1, since) if every > 1 else 1)
        if report.skipped:
            counted += max(1, report.local_steps)
        else:
            counted = report.step + 1
    return balance.verdict(rank.begin.get("link", ""))


def _last_value(run: Run, name: str) -> Tile:
    notes = [note for rank in run.ranks for note in rank.values if name in note.content]
    is_independent = are_steps_independent(run)
    # Order by step; if ranks count steps independently, by time.
    last = max(notes, key=lambda note: (0 if is_independent else note.step, note.seconds))
    value = last.content[name]
    if value is None:
        value_text = "not finite"
    else:
        is_share = "accuracy" in name.lower() and 0 <= value <= 1
        value_text = percent_text(value) if is_share else f"{value:.4g}"
    where = "" if is_independent else f"at step {count_text(last.step)}, "
    detail = f"logged {where}after {duration_text(last.seconds)}"
    return Tile(f"{name[0].upper()}{name[1:]}", value_text, detail, loss=value is None)


def _sent(run: Run) -> Tile | None:
    """Return the bytes sent in a step, compared with the best dense allreduce; None if unknown."""
    steps = [step.report for step in _settled_steps(run)]
    # Earlier versions did not record the number of ranks in a step.
    ranks = max((step.ranks for step in steps), default=0) or int(run.first.begin["ranks"])
    if not steps or ranks == 1:
        return None
    # Per optimizer step: plain data parallelism runs a dense allreduce after each.
    sent = sum(step.sent_bytes for step in steps) / max(sum(s.local_steps for s in steps), 1)
    dense = dense_bytes(values(run), ranks)
    counted = "" if all(step.bytes_counted for step in steps) else " (computed)"
    if not sent or not dense:
        return None
    # Report a loss as plainly as a gain.
    value = f"1/{digits(dense / sent)}" if dense > sent else f"{digits(sent / dense)} times"
    detail = (
        f"{bytes_text(sent)} a step from each rank{counted}; a dense allreduce of float32 sends at "
        f"least {bytes_text(dense)}"
    )
    return Tile("Bytes sent, of dense", value, detail, loss=sent > 1.01 * dense)


def _step(run: Run) -> Tile:
    steps = _settled_steps(run)
    seconds = mean_parts(steps)
    total, computed = sum(seconds.values()), utilisation(seconds)
    longest = max((part for part in seconds if part != "compute"), key=lambda part: seconds[part])
    detail = f"mean of the ranks: {percent_text(computed)} of it compute"
    if total and seconds[longest] > 0.01 * total:
        detail += f", {percent_text(seconds[longest] / total)} {longest}"
    if run.first.begin.get("link"):
        detail += f"; over an {run.first.begin['link']}"
    if is_of_several(run):
        local_steps = statistics.fmean(step.report.local_steps for step in steps)
        detail += f"; each contains {local_steps:.3g} local steps of a rank"
    return Tile(f"{with_article(covers(run)).capitalize()} takes", seconds_text(total), detail)


def _ranks(run: Run) -> Tile:
    started, ranks = len(run.ranks), int(run.first.begin["ranks"])
    failed = [rank for rank in run.ranks if abnormal_end(rank, run) is not None]
    so_far = " so far" if _is_running(run) else ""
    detail = f"{steps_taken(run)} in {duration_text(run.seconds)}{so_far}"
    if started < ranks:
        detail += f"; {ranks - started} of them have no record here, see below"
    if failed:
        detail += f"; {len(failed)} ended abnormally, see below"
    return Tile("Ranks", str(ranks), detail, loss=bool(failed) or started < ranks)


def steps_taken(run: Run) -> str:
    """Return the number of steps as text; a range if ranks differ."""
    taken = [rank.step_count for rank in run.ranks]
    if is_of_several(run) and min(taken) < max(taken):
        return f"{count_text(min(taken))} to {count_text(max(taken))} steps each"
    return counted(max(taken), "step")


def _is_running(run: Run) -> bool:
    """Tell whether the run may still be going on: no rank has reported an end."""
    return all(rank.end is None for rank in run.ranks)


def abnormal_end(rank: RankRecord, run: Run) -> str | None:
    """Return a text on a rank that ended abnormally; None for others."""
    if rank.end is None and _is_running(run):
        return None
    if rank.end is None:
        since = f"step {rank.steps[-1].report.step}" if rank.steps else "it began"
        return f"has written nothing after {since}, and no end: it is still running, or was killed"
    return None if rank.in_order else rank.end


def events(run: Run) -> list[tuple[str, str]]:
    """Return the run's events as (when and where, what).

    Order: missing records, other runs, abnormal ends, skipped steps, messages.
    """
    found = [each for each in (run.missing_text(), run.skipped_text()) if each is not None]
    if count := run.earlier_runs:
        runs = "an earlier run" if count == 1 else f"{count} earlier runs"
        found.append(("this folder", f"also holds {runs}; the last one is shown"))
    found += [
        (f"rank {rank.rank}", reason)
        for rank in run.ranks
        if (reason := abnormal_end(rank, run)) is not None
    ]
    skipped = [[s.report.step for s in rank.steps if s.report.skipped] for rank in run.ranks]
    if any(skipped) and covers(run) == "period":
        where = counted(sum(map(len, skipped)), "period")
        found.append((where, "contained updates that were not finite, and were left out"))
    elif any(skipped):
        # All ranks skip the same steps, so the longest list comes from the most complete record.
        skipped_steps = max(skipped, key=len)
        text = f"skipped on every rank, at {_places(skipped_steps)}"
        found.append((counted(len(skipped_steps), covers(run)), text))
    messages = sorted(
        ((note, rank.rank) for rank in run.ranks for note in rank.messages),
        key=lambda each: each[0].seconds,
    )
    seen: set[str] = set()
    for note, number in messages:
        # Drop the prefix with the rank, so that a message of all ranks appears only once.
        text = note.content["text"].removeprefix(f"rank {number}: ")
        if text not in seen:
            seen.add(text)
            found.append((f"step {count_text(note.step)}, rank {number}", text))
    if len(found) > _FEW:
        rest = f"and {len(found) - _FEW} more lines in the files"
        found = [*found[:_FEW], ("", rest)]
    return found


def _places(steps: Sequence[int]) -> str:
    """Return a text that lists steps, with counts for repeated ones.

    If a GradScaler skips a step because of a non-finite gradient, the next one has the same number.
    """
    places = Counter(steps)
    return listed(
        [
            f"step {count_text(step)}" + (f" ({times} times)" if times > 1 else "")
            for step, times in sorted(places.items())
        ]
    )


def what_was_run(run: Run) -> dict[str, str]:
    """Return the settings, hardware and software of the run, by name."""
    begins = [rank.begin for rank in run.ranks]
    hosts = Counter(begin["host"] for begin in begins)
    methods = {step.report.algorithm for rank in run.ranks for step in rank.steps} - {""}
    started = datetime.fromtimestamp(run.began_unix_seconds, timezone.utc)
    first = begins[0]
    uncertain = max(begin["clock_uncertain_seconds"] for begin in begins)
    found = {
        "Ranks": str(first["ranks"]),
        "Hosts": ", ".join(f"{name} ({count})" for name, count in hosts.items()),
        "Processor": ", ".join(sorted({begin["processor"] for begin in begins})),
        "Transport": f"{first['transport']}: {first['library']}",
        "Started": started.isoformat(sep=" ", timespec="seconds"),
        "gtopk": first["gtopk"],
        "PyTorch": first["torch"],
        "Python": first["python"],
    }
    if count := values(run):
        subject = "model" if is_of_several(run) else "gradient"
        found[f"Values of the {subject}"] = count_text(count)
    if methods:
        found["Reduced by"] = ", ".join(sorted(methods))
    if uncertain:
        found["Clocks"] = f"equal to within {seconds_text(uncertain)}"
    return found
