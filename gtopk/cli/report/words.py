"""What a report says in words: the figures at its head, how ranks ended, what the library said."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from collectives.cost import dense_bytes

from ...telemetry.reading import RankRecord, Run
from ...telemetry.step_report import Balance
from ...units import bytes_text, count_text, digits, percent_text, seconds_text
from . import series
from .series import a, several

_FEW = 12  # messages shown


class Tile(NamedTuple):
    """A figure at the head of the page."""

    name: str
    value: str
    detail: str
    loss: bool = False


def tiles(run: Run) -> Iterator[Tile]:
    """Yield what is to be seen first."""
    names = series.value_names(run)
    if names:
        yield _last_value(run, names[0])
    if (sent := _sent(run)) is not None:
        yield sent
    if any(rank.steps for rank in run.ranks):
        yield _step(run)
    yield _ranks(run)


def verdict(run: Run) -> str:
    """Return whether compression has paid; "" where its record does not tell."""
    rank, balance = run.first, Balance()
    for step in rank.steps:
        balance.note(step.report, int(rank.begin.get("every", 1)))
    return balance.verdict()


def _last_value(run: Run, name: str) -> Tile:
    notes = [note for rank in run.ranks for note in rank.values if name in note.content]
    alone = series.steps_alone(run)
    last = max(notes, key=lambda note: (0 if alone else note.step, note.seconds))
    value = last.content[name]
    if value is None:
        said = "not finite"
    else:
        is_share = "accuracy" in name.lower() and 0 <= value <= 1
        said = percent_text(value) if is_share else f"{value:.4g}"
    where = "" if alone else f"at step {count_text(last.step)}, "
    detail = f"logged {where}after {seconds_text(last.seconds)}"
    return Tile(f"{name[0].upper()}{name[1:]}", said, detail, loss=value is None)


def _sent(run: Run) -> Tile | None:
    """Return the bytes of a step, beside those of the best dense allreduce."""
    steps = [step.report for rank in run.ranks for step in series.settled(rank)]
    ranks = max((step.ranks for step in steps), default=0) or int(run.first.begin["ranks"])
    if not steps or ranks == 1:
        return None
    # Of an optimizer's own step, which a dense allreduce would follow each time.
    sent = sum(step.sent_bytes for step in steps) / max(sum(s.local_steps for s in steps), 1)
    dense = dense_bytes(series.values(run), ranks)
    counted = "" if all(step.bytes_counted for step in steps) else ", by a formula"
    if not sent or not dense:
        return None
    value = f"1/{digits(dense / sent)}" if dense > sent else f"{digits(sent / dense)} times"
    detail = (
        f"{bytes_text(sent)} a step from each rank{counted}; a dense allreduce of float32 sends at "
        f"least {bytes_text(dense)}"
    )
    return Tile("Bytes sent, of dense", value, detail, loss=sent > 1.01 * dense)


def _step(run: Run) -> Tile:
    steps = [step for rank in run.ranks for step in series.settled(rank)]
    seconds = series.mean_parts(steps)
    total, computed = sum(seconds.values()), series.utilisation(seconds)
    longest = max((part for part in seconds if part != "compute"), key=lambda part: seconds[part])
    covers = series.covers(run)
    detail = f"mean of the ranks: {percent_text(computed)} of it compute"
    if total and seconds[longest] > 0.01 * total:
        detail += f", {percent_text(seconds[longest] / total)} {longest}"
    if run.first.begin.get("link"):
        detail += f"; over an {run.first.begin['link']}"
    if series.is_of_several(run):
        own = statistics.fmean(step.report.local_steps for step in steps)
        detail += f"; {own:.3g} steps of a rank by itself are in one"
    return Tile(f"{a(covers).capitalize()} takes", seconds_text(total), detail)


def _ranks(run: Run) -> Tile:
    started, ranks = len(run.ranks), int(run.first.begin["ranks"])
    amiss = [rank for rank in run.ranks if how_it_left(rank, run) is not None]
    goes_on = " so far" if _goes_on(run) else ""
    detail = f"{steps_taken(run)} in {seconds_text(run.seconds)}{goes_on}"
    if started < ranks:
        detail += f"; {ranks - started} of them have no record here, see below"
    if amiss:
        detail += f"; {len(amiss)} did not end in order, see below"
    return Tile("Ranks", str(ranks), detail, loss=bool(amiss) or started < ranks)


def steps_taken(run: Run) -> str:
    """Return how many steps the ranks took, which each may count by itself."""
    taken = [rank.taken for rank in run.ranks]
    if series.is_of_several(run) and min(taken) < max(taken):
        return f"{count_text(min(taken))} to {count_text(max(taken))} steps each"
    return f"{count_text(max(taken))} {several('step', max(taken))}"


def _goes_on(run: Run) -> bool:
    """Tell whether the run is not over, as far as its ranks say."""
    return all(rank.end is None for rank in run.ranks)


def how_it_left(rank: RankRecord, run: Run) -> str | None:
    """Return what is to be said of a rank that did not end in order; None of others."""
    if rank.end is None and _goes_on(run):
        return None
    if rank.end is None:
        since = f"step {rank.steps[-1].report.step}" if rank.steps else "it began"
        return f"has written nothing after {since}, and not how it left: it goes on, or was killed"
    return None if rank.in_order else rank.end


def happenings(run: Run) -> list[tuple[str, str]]:
    """Return what happened, as (when and where, what).

    Whose record is missing first, other runs, ends out of order, then what was said.
    """
    found = [each for each in (run.lacks(), run.unread()) if each is not None]
    if count := run.earlier_runs:
        runs = "an earlier run" if count == 1 else f"{count} earlier runs"
        found.append(("this folder", f"holds {runs}, too: shown is the last one"))
    found += [
        (f"rank {rank.rank}", said)
        for rank in run.ranks
        if (said := how_it_left(rank, run)) is not None
    ]
    skipped = [[s.report.step for s in rank.steps if s.report.skipped] for rank in run.ranks]
    if any(skipped) and series.covers(run) == "period":
        count = sum(map(len, skipped))
        where = f"{count} {several('period', count)}"
        found.append((where, "held updates that were not finite, and are left out"))
    elif any(skipped):
        of_all = max(skipped, key=len)  # each rank's are the same, as far as its record goes
        where = f"{len(of_all)} {several(series.covers(run), len(of_all))}"
        found.append((where, f"skipped on every rank, at {_places(of_all)}"))
    messages = sorted(
        ((note, rank.rank) for rank in run.ranks for note in rank.messages),
        key=lambda each: each[0].seconds,
    )
    seen: set[str] = set()
    for note, number in messages:
        text = note.content["text"]
        if text not in seen:
            seen.add(text)
            found.append((f"step {count_text(note.step)}, rank {number}", text))
    if len(found) > _FEW:
        left = f"and {len(found) - _FEW} more lines, which the files hold"
        found = [*found[:_FEW], ("", left)]
    return found


def _places(steps: Sequence[int]) -> str:
    """Return at which steps something was, and how many times.

    A GradScaler that finds a gradient not finite makes no step: the next one has its number.
    """
    places = Counter(steps)
    shown = [
        f"step {count_text(step)}" + (f" ({times} times)" if times > 1 else "")
        for step, times in sorted(places.items())[:_FEW]
    ]
    more = f" and {len(places) - _FEW} more" if len(places) > _FEW else ""
    return ", ".join(shown) + more


def what_was_run(run: Run) -> dict[str, str]:
    """Return names and values of what was run, and on what."""
    begins = [rank.begin for rank in run.ranks]
    hosts: dict[str, int] = {}
    for begin in begins:
        hosts[begin["host"]] = hosts.get(begin["host"], 0) + 1
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
    if values := series.values(run):
        of = "model" if series.is_of_several(run) else "gradient"
        found[f"Values of the {of}"] = count_text(values)
    if methods:
        found["Reduced by"] = ", ".join(sorted(methods))
    if uncertain:
        found["Clocks"] = f"alike to within {seconds_text(uncertain)}"
    return found
