"""`gtopk report`: show a run as one HTML page, with a note on how to read each figure, or as JSON.

series.py    a run's data as lines and texts
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...telemetry.lines import shown
from ...telemetry.reading import RankRecord, Run, Step, read_run
from ...telemetry.step_report import PARTS, batch
from ...units import (
    SPACE,
    counted,
    digits,
    duration_text,
    percent_text,
    plural,
    seconds_text,
    with_article,
)
from .. import charts
from ..arguments import Command, fail, output_file, write_records
from ..charts import Lines, Point, figure, prose, share_text
from . import series
from .series import MEANINGS, WAITS, events, steps_taken, tiles, verdict, what_was_run

_MANY_RANKS = 64  # draw no more bars
_MANY = 8  # with more ranks, bars have no words, and lines per rank are not drawn
_EXPLAINED = {
    "compute": "compute is forward, backward and the optimizer's own step",
    "wait": "wait is for the other ranks to be ready, and for earlier exchanges to end",
    "select": "select is accumulating, selecting, and copying gradients to and from buckets",
    "pack": "pack is encode and decode",
    "exchange": "exchange is sending and receiving messages",
    "merge": "merge is adding up the received entries, and selecting among the sums",
}


def figures(run: Run) -> dict[str, list[str]]:
    """Return the figures that have data, by heading."""
    scores = [note for rank in run.ranks for note in rank.scores]
    residuals = [note for rank in run.ranks for note in rank.residuals]
    found = {
        "Logged values": learnt(run),
        "Where the time went": [
            parts_figure(run),
            over_steps_figure(run),
            _one_line(run, series.of_notes(run, scores, "score"), *_SCORE),
            prediction_figure(run),
        ],
        "What each rank worked on": [batches_figure(run)],
        "What was sent, and the residual": [
            density_figure(run),
            _one_line(run, series.of_steps(run, series.bits_per_entry), *_BITS),
            _one_line(run, series.of_notes(run, residuals, "norm"), *_NORM),
            _one_line(run, series.of_notes(run, residuals, "age_steps"), *_AGE),
        ],
    }
    with_data = {heading: [each for each in drawn if each] for heading, drawn in found.items()}
    return {heading: drawn for heading, drawn in with_data.items() if drawn}


def learnt(run: Run) -> list[str]:
    """Show each logged value over steps, time and bytes, one at a time."""
    axes = series.axes(run)
    # If ranks count steps independently, the same step may be hours apart.
    if series.are_steps_independent(run):
        del axes["steps"]
    return [_learnt(run, name, axes, place) for place, name in enumerate(series.value_names(run))]


def _learnt(run: Run, name: str, axes: Mapping[str, series.Place], place: int) -> str:
    share = "accuracy" in name.lower()
    drawn = {}
    for over, place_of in axes.items():
        points = series.logged(run, name, place_of)
        # A single rank sends nothing, so there is no axis of bytes.
        if not points or (over == "bytes" and points[-1].x == 0):
            continue
        # Scripts may log accuracy in per cent instead of as a fraction.
        share = share and all(p.low >= 0 and p.high <= 1 for p in points)
        to_text = share_text if share else charts.plain_text
        title = f"{name} over {charts.X_AXES[over][0]}"
        drawn[over] = charts.lines_plot(title, {name: points}, name, over=over, to_text=to_text)
    if not drawn:
        return ""
    logging = sum(any(name in note.content for note in rank.values) for rank in run.ranks)
    sources = "one rank's" if logging == 1 else f"{logging} ranks'"
    reading = (
        f"The line is the mean of {sources} values; its band goes from their minimum to their "
        "maximum at each position."
    )
    if "bytes" in drawn:
        reading += " Bytes are those a rank has sent by then, on average, not received."
    return figure(f"{name[0].upper()}{name[1:]}", tabs(f"learnt-{place}", drawn), reading)


def tabs(identity: str, drawn: dict[str, str]) -> str:
    """Return drawings as tabs that need no script; the first one is selected."""
    if len(drawn) == 1:
        return next(iter(drawn.values()))
    inputs, panels = [], []
    for place, (over, drawing) in enumerate(drawn.items()):
        own = f"{identity}-{over}"
        checked = " checked" if place == 0 else ""
        inputs.append(
            f'<input type="radio" name="{identity}" id="{own}"{checked}>'
            f'<label for="{own}">over {over}</label>'
        )
        panels.append(f"<div>{drawing}</div>")
    return f'<div class="tabs">{"".join(inputs)}<div class="panels">{"".join(panels)}</div></div>'


def parts_figure(run: Run) -> str:
    """Show each rank's mean step by part."""
    by_rank = {
        rank.rank: series.mean_parts(series.settled(rank))
        for rank in run.ranks[:_MANY_RANKS]
        if rank.steps
    }
    left_out = max(0, len(run.ranks) - _MANY_RANKS)
    steps = [step for rank in run.ranks for step in series.settled(rank)]
    hidden = sum(step.report.hidden_seconds for step in steps)
    working = sum(step.report.working_seconds for step in steps)
    covers = series.covers(run)
    shown = _parts_with_time(by_rank.values())
    explained = {**_EXPLAINED, "wait": WAITS.get(covers, _EXPLAINED["wait"])}
    reading = (
        f"{MEANINGS.get(covers, '')}A bar is a rank's mean {covers}, and all of its wall clock: "
        f"{'; '.join(explained[part] for part in shown)}. "
    )
    if hidden and working:
        reading += (
            f"{percent_text(hidden / working)} of the exchange went on while ranks computed, and "
            "is no part of the bars. "
        )
    reading += f"The first steps are left out{f', and {left_out} ranks' if left_out else ''}."
    return figure(
        f"{with_article(covers).capitalize()} of each rank",
        _parts_legend(shown) + _bars(by_rank),
        reading,
    )


def _bars(by_rank: Mapping[int, Mapping[str, float]]) -> str:
    """Draw each rank's mean step, and name the longest parts below it."""
    rows = []
    for rank, seconds in by_rank.items():
        total = sum(seconds.values())
        longest = sorted(PARTS, key=lambda part: -seconds[part])[:3]
        words = " · ".join(
            f"{part} {100 * seconds[part] / total:.0f}{SPACE}%"
            for part in longest
            if seconds[part] > 0.005 * total
        )
        rows.append((f"rank {rank}", seconds, words if len(by_rank) <= _MANY else ""))
    title = "Where the time of a step went, one bar per rank, split by part"
    return charts.bars(title, rows)


def _parts_with_time(of: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the parts that take time."""
    found = list(of)
    return [part for part in PARTS if any(each[part] > 0 for each in found)]


def _parts_legend(shown: Sequence[str]) -> str:
    return charts.parts_legend({part: part for part in shown})


def over_steps_figure(run: Run) -> str:
    """Show the parts of a step over steps, or over time if ranks count steps independently."""
    is_independent = series.are_steps_independent(run)
    found = series.parts_over_time(run) if is_independent else series.parts_over_steps(run)
    if len(found) < 2:
        return ""
    covers = series.covers(run)
    if is_independent:
        drawn = charts.stacked(
            "Share of the ranks' time by part, over time",
            found,
            "of the ranks' time",
            over="time",
            to_text=share_text,
            most=1.0,
        )
        reading = f"All ranks' time, of neighbouring {plural(covers)} together. "
    else:
        what = with_article(covers)
        drawn = charts.stacked(
            f"Time of {what} by part, over the steps, mean of the ranks",
            found,
            f"{what} takes",
            over="steps",
            to_text=seconds_text,
            most=1.05 * max(sum(seconds.values()) for _, seconds in found),
        )
        reading = (
            "Means over the ranks, and over neighbouring steps if there are more than a line can "
            "show. "
        )
    reading += "A lasting change shows that the machines or the network changed."
    return figure(
        f"{plural(covers).capitalize()}, one after the other",
        _parts_legend(_parts_with_time(parts for _, parts in found)) + drawn,
        reading,
    )


def prediction_figure(run: Run) -> str:
    """Show the predicted and the measured time of the exchange."""
    rank = run.first
    steps = [step for step in series.settled(rank) if step.report.predicted_seconds]
    if not steps:
        return ""
    found = {
        "measured": series.binned((s.report.step, s.report.exchange_seconds) for s in steps),
        "predicted": series.binned((s.report.step, s.report.predicted_seconds) for s in steps),
    }
    ratios = sorted(s.report.exchange_seconds / (s.report.predicted_seconds or 1) for s in steps)
    return figure(
        "The exchange, predicted and measured",
        _lines(
            "Seconds of a step's exchange, predicted and measured",
            found,
            "a step's exchange takes",
            to_text=seconds_text,
            logarithmic=charts.spans_factor([p for points in found.values() for p in points], 8),
            bands=False,
        ),
        f"On rank {rank.rank}: from accumulate to apply, as in the cost model. The median ratio of "
        f"measured to predicted time is {digits(ratios[len(ratios) // 2])}. Waiting for a late "
        "rank is measured, but not predicted. Neither includes the ranks' agreement to begin, "
        "which the line at the run's start adds to each bucket.",
    )


def batches_figure(run: Run) -> str:
    """Show the samples of each rank's steps."""
    found = {
        f"rank {rank.rank}": series.binned(
            (series.place(run, step), batch(step.report)) for step in rank.steps
        )
        for rank in run.ranks
    }
    found = {name: points for name, points in found.items() if points}
    if not found:
        return ""
    shown = dict(list(found.items())[:_MANY])
    if series.covers(run) == "round":
        reading = "Samples of a rank in a round: of as many micro-batches as there was time for."
    else:
        reading = (
            "Samples of a step of a rank's optimizer, as set by the adaptive loader or by the "
            "script."
        )
        if series.is_of_several(run):
            reading += " Each is a mean over the steps that are recorded as one."
    return figure(
        "Batch sizes",
        _lines(
            "Samples of each rank's steps", shown, "samples", over=series.over(run), bands=False
        ),
        reading + (f" The first {_MANY} ranks of {len(found)}." if len(found) > len(shown) else ""),
    )


def density_figure(run: Run) -> str:
    """Show the fractions of the values that are sent and updated."""
    sent = series.of_steps(run, _share_of("selected"))
    updated = series.of_steps(run, _share_of("updated"))
    # Skip dense runs, which always send everything.
    if not sent or all(point.low == 1 for point in sent):
        return ""
    found = {"a rank selects": sent, "the update holds": updated}
    return figure(
        "Density",
        _lines(
            "Share of the gradient's values that a rank selects, and that the update holds",
            found,
            "of the gradient's values",
            over=series.over(run),
            to_text=share_text,
            logarithmic=charts.spans_factor([*sent, *updated], 30),
        ),
        "Of all values that are exchanged: what a rank selects, and what the agreed update holds. "
        "Parameters that are kept dense count in both.",
    )


def _lines(title: str, found: Lines, y_name: str, **options: Any) -> str:
    """Return a legend and a plot of lines from zero; options: arguments of `lines_plot`."""
    plot = charts.lines_plot(title, found, y_name, from_zero=True, **options)
    return charts.lines_legend(found) + plot


def _share_of(what: str) -> Callable[[Step], float | None]:
    def share(step: Step) -> float | None:
        report = step.report
        if not report.elements or report.skipped:
            return None
        return float(getattr(report, what)) / report.elements

    return share


# For plots of one line: title, name of the y axis, and how to read it.
_SCORE = (
    "Straggler score",
    "score",
    "How fast a rank computes: the fastest rank's median seconds over its own, every 6 steps. 1 is "
    "the fastest rank; where the band goes down to 0.25, the others wait three quarters of their "
    "time for the slowest.",
)
_BITS = (
    "Bits per entry",
    "bits",
    "Bits per entry (index and value) in the messages that a rank sent, headers included. In "
    "memory an entry takes 64.",
)
_NORM = (
    "Norm of the residual",
    "norm",
    "What a rank has accumulated and not sent, sampled now and then. It levels off when a step "
    "sends as much as it adds. If it keeps growing, raise the density.",
)
_AGE = (
    "Age of the residual",
    "steps",
    "How many steps like the last would send as much as the residual: the sum of its absolute "
    "values over that of those sent. A value waits about that long (Little's law), if values do "
    "not cancel out.",
)


def _one_line(run: Run, points: Sequence[Point], title: str, y_name: str, reading: str) -> str:
    """Return a figure with one line; "" without points."""
    if not points:
        return ""
    over = series.over(run)
    drawn = charts.lines_plot(title, {title: points}, y_name, over=over, from_zero=True)
    return figure(title, drawn, f"{reading} The band goes from the ranks' least to their most.")


def page(run: Run, name: str) -> str:
    """Return the page of a run; name: of its record's folder."""
    # Escape the folder's name, which may contain control characters or markup.
    title = f"Run {shown(name)}"
    drawn = "".join(charts.plots(heading, plots) for heading, plots in figures(run).items())
    lead, event_list = verdict(run), ""
    if lead:
        lead = f'<p class="lead"><strong>{escape(lead[0].upper() + lead[1:])}.</strong></p>\n'
    if found := events(run):
        items = "".join(
            f"<li><h3>{escape(where)}</h3><p>{prose(text)}</p></li>" for where, text in found
        )
        event_list = f'<h2>What happened</h2>\n<ul class="findings">{items}</ul>\n'
    return charts.page(
        title,
        f"""{lead}<p class="lead">{escape(opening(run))}</p>
{charts.tiles(tiles(run))}
{drawn}{event_list}{charts.facts(what_was_run(run))}""",
    )


def opening(run: Run) -> str:
    """Return the page's opening sentence."""
    begin = run.first.begin
    ranks, hosts = int(begin["ranks"]), len({rank.begin["host"] for rank in run.ranks})
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    over = begin["transport"]
    emulated = ""
    if link := begin.get("link"):
        over += f" and an {link}"
        emulated = " Seconds are emulated: messages waited as long as they would there."
    return (
        f"{counted(ranks, 'rank')} on {where}, over {over}, took "
        f"{steps_taken(run)} in {duration_text(run.seconds)}. All figures are measured by the "
        f"ranks, unless they are called predicted.{emulated}"
    )


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk report",
        "Draw a run as one self-contained HTML page, from the record that its ranks "
        "wrote. Works during the run, too.",
        "GTOPK_RUN=runs/first gtopk run -n 4 train.py\n  gtopk report runs/first --out first.html",
    )
    described.add_argument("run", type=Path, metavar="RUN", help="folder with the record")
    out = "page to write; default: report.html in RUN"
    described.option("--out", output_file, None, out, metavar="FILE")
    described.flag("--json", "print the figures as JSON, and write no page")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, print its path, and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        run = read_run(options.run)
    except (OSError, ValueError) as error:
        return fail("report", error)
    for problem in (run.missing_text(), run.skipped_text()):
        if problem is not None:
            print(f"gtopk report: {': '.join(problem)}", file=sys.stderr)
    if options.json:
        write_records(as_record(run))
        return 0
    if not any(rank.steps for rank in run.ranks):
        return fail("report", f"the run in '{options.run}' has no steps yet: nothing can be drawn")
    out = options.out or options.run / "report.html"
    try:
        out.write_text(page(run, options.run.resolve().name), encoding="utf-8")
    except OSError as error:
        return fail("report", f"--out {out} cannot be written: {error.strerror}")
    print(out)
    return 0


def as_record(run: Run) -> dict[str, Any]:
    """Return the page's content in JSON types."""
    over = series.axes(run)["steps"]
    return {
        "run": what_was_run(run),
        "began_unix_seconds": run.began_unix_seconds,
        "seconds": run.seconds,
        "figures": {each.name: [each.value, each.detail] for each in tiles(run)},
        "verdict": verdict(run),
        "happened": events(run),
        "logged": {
            name: [point[:2] for point in series.logged(run, name, over)]
            for name in series.value_names(run)
        },
        "ranks": [_of_rank(rank) for rank in run.ranks],
    }


def _of_rank(rank: RankRecord) -> dict[str, Any]:
    last = rank.steps[-1] if rank.steps else None
    seconds = series.mean_parts(series.settled(rank)) if rank.steps else None
    residual = rank.residuals[-1].content if rank.residuals else {}
    return {
        "rank": rank.rank,
        "host": rank.begin["host"],
        "steps": rank.step_count,
        "covers": last.report.covers if last else None,
        "samples": last.samples_so_far if last else 0,
        "sent_bytes": last.bytes_so_far if last else 0,
        "step_seconds": seconds,
        "utilisation": series.utilisation(seconds) if seconds else 0.0,
        "straggler_score": rank.scores[-1].content["score"] if rank.scores else None,
        "residual_norm": residual.get("norm"),
        "residual_age_steps": residual.get("age_steps"),
        "end": rank.end,
    }
