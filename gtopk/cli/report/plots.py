"""The report's plots, each a pure function from series to SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from ...telemetry.step_report import PARTS
from ...units import SPACE, bytes_text, seconds_text, with_article
from ..charts import (
    WIDTH,
    Axis,
    band,
    drawing,
    frame,
    hatches,
    horizontal,
    line,
    path,
    text,
    vertical,
)
from .series import Point

ROW, BAR = 54, 16  # units of the drawing
MANY: Final = 8  # ranks; beyond, a row has no words below its bar
SLIM_ROW: Final = 22


class Written(Protocol):
    """Writes a value, in so many digits."""

    def __call__(self, value: float, count: int = ..., /) -> str: ...


def steps_text(value: float, count: int = 4) -> str:
    """Return 12000 as "12k", and 20000000 as "20M"."""
    for least, unit, suffix in ((1e10, 1e9, "G"), (1e7, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / unit:.{count}g}{suffix}"
    return f"{value:g}"


def plain_text(value: float, count: int = 4) -> str:
    """Return a value of unknown unit in few digits."""
    return f"{value:.{count}g}"


X_TEXTS: Final[Mapping[str, Written]] = {
    "steps": steps_text,
    "time": seconds_text,
    "bytes": bytes_text,
}
X_NAMES: Final = {"steps": "step", "time": "time", "bytes": "sent by a rank so far"}


def lines_plot(
    title: str,
    series: Mapping[str, Sequence[Point]],
    y_name: str,
    *,
    over: str = "steps",
    written: Written = plain_text,
    logarithmic: bool = False,
    from_zero: bool = False,
    bands: bool = True,
) -> str:
    """Draw one line per series, in a band from the least to the most."""
    points = [point for each in series.values() for point in each]
    x = horizontal(min(p.x for p in points), max(p.x for p in points))
    low = min(p.low if bands else p.mean for p in points)
    high = max(p.high if bands else p.mean for p in points)
    if logarithmic and low > 0:
        y = vertical(low / 1.3, high * 1.3, logarithmic=True)
    else:
        room = 0.06 * (high - low)
        # An axis from zero shows a value's size, and not its noise, where that costs little room; a
        # constant has no range of its own.
        near_zero = low >= 0 and (low < 0.3 * high or low == high)
        bottom = min(0.0, low) if from_zero or near_zero else low - room
        y = vertical(bottom, high + room)
    drawn = []
    for place, each in enumerate(series.values()):
        middle = [(x.place(p.x), y.place(p.mean)) for p in each]
        parts = [line(middle)] if len(middle) > 1 else [_dot(middle[0])]
        if bands and len(each) > 1 and any(p.high > p.low for p in each):
            lower = [(x.place(p.x), y.place(max(p.low, y.low))) for p in each]
            upper = [(x.place(p.x), y.place(p.high)) for p in each]
            parts.insert(0, band(lower, upper))
        drawn.append(f'<g class="series-{place % 6}">{"".join(parts)}</g>')
    names = (X_NAMES[over], y_name)
    axes = frame(x, y, _ticks(x, X_TEXTS[over]), _ticks(y, written), names)
    return drawing(title, [axes, *drawn])


def _dot(at: tuple[float, float]) -> str:
    return f'<circle class="bar" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4"/>'


def _ticks(axis: Axis, written: Written) -> dict[float, str]:
    """Return an axis' ticks in words that tell them apart; of steps, which are whole, no others."""
    values = [v for v in axis.ticks() if written is not steps_text or v == int(v)]
    said = [written(value) if value else "0" for value in values]
    # More digits, until no two ticks read alike: 17 tell any two floats apart.
    for count in range(4, 17):
        if len({*said}) == len(said):
            break
        said = [written(value, count) if value else "0" for value in values]
    return dict(zip(values, said, strict=True))


def parts_of_ranks(by_rank: Mapping[int, Mapping[str, float]]) -> str:
    """Draw a bar for each rank, of its mean step, stacked by part."""
    totals = {rank: sum(seconds.values()) for rank, seconds in by_rank.items()}
    # A hook's step may take no time at all.
    scale = (WIDTH - 130) / (max(totals.values()) or 1.0)
    row = ROW if len(by_rank) <= MANY else SLIM_ROW
    drawn = []
    for place, (rank, seconds) in enumerate(by_rank.items()):
        top, left = place * row, 62.0
        drawn.append(text((0, top + 13), f"rank {rank}", "label"))
        for part in PARTS:
            width = seconds[part] * scale
            # Thinner ones cannot be seen.
            if width >= 0.05:
                drawn.append(
                    f'<rect class="part {part}" x="{left:.2f}" y="{top}" width="{width:.2f}" '
                    f'height="{BAR}"/>'
                )
            left += width
        drawn.append(text((left + 6, top + 13), seconds_text(totals[rank]), "tick"))
        if row == ROW:
            words = _longest_parts(seconds, totals[rank])
            drawn.append(text((62, top + BAR + 16), words, "tick"))
    title = "Where the time of a step went, one bar per rank, split by part"
    return drawing(title, [hatches("wait", "exchange"), *drawn], height=len(by_rank) * row)


def _longest_parts(seconds: Mapping[str, float], total: float) -> str:
    longest = sorted(PARTS, key=lambda part: -seconds[part])[:3]
    return " · ".join(
        f"{part} {100 * seconds[part] / total:.0f}{SPACE}%"
        for part in longest
        if seconds[part] > 0.005 * total
    )


def series_key(place: int) -> str:
    """Draw a line as small as a word, for a legend."""
    return (
        f'<svg class="key series-{place % 6}" viewBox="0 0 34 14" aria-hidden="true">'
        f"{line([(1, 7), (33, 7)])}</svg>"
    )


Parts = Sequence[tuple[float, Mapping[str, float]]]  # where on the x axis, and each part there


def parts_over_steps(found: Parts, covers: str = "step") -> str:
    """Draw the seconds of a step over the steps; covers: what is one."""
    y = vertical(0.0, 1.05 * max(sum(seconds.values()) for _, seconds in found))
    title = f"Time of {with_article(covers)} by part, over the steps, mean of the ranks"
    return _stacked(
        title, found, y, (steps_text, seconds_text), ("step", f"{with_article(covers)} takes")
    )


def parts_over_time(found: Parts) -> str:
    """Draw the share of the ranks' time that each part had, over time."""
    title = "Share of the ranks' time by part, over time"
    names = ("time", "of the ranks' time")
    return _stacked(title, found, vertical(0.0, 1.0), (seconds_text, share_text), names)


def _stacked(
    title: str,
    found: Parts,
    y: Axis,
    written: tuple[Written, Written],
    names: tuple[str, str],
) -> str:
    """Draw the parts, one area on the other."""
    x = horizontal(found[0][0], found[-1][0])
    places = [x.place(at) for at, _ in found]
    below = [0.0] * len(found)
    drawn = []
    for part in PARTS:
        above = [under + shown[part] for under, (_, shown) in zip(below, found, strict=True)]
        lower = [(at, y.place(value)) for at, value in zip(places, below, strict=True)]
        upper = [(at, y.place(value)) for at, value in zip(places, above, strict=True)]
        # A part without any time would still be drawn as a line.
        if any(high > low for high, low in zip(above, below, strict=True)):
            drawn.append(f'<path class="part {part}" d="M{path(lower)}L{path(upper[::-1])}Z"/>')
        below = above
    axes = frame(x, y, _ticks(x, written[0]), _ticks(y, written[1]), names)
    return drawing(title, [*drawn, axes])


def are_apart(points: Sequence[Point], times: float) -> bool:
    """Tell whether some are more than so many times the others: an axis had best be logarithmic."""
    positive = [p.mean for p in points if p.mean > 0]
    return len(positive) == len(points) and max(positive) > times * min(positive)


def share_text(share: float, count: int = 2) -> str:
    """Return a share as a percentage: 0.001 as "0.1 %"."""
    if share <= 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(100 * share)))
    said = f"{100 * share:.{decimals}f}"
    return f"{said.rstrip('0').rstrip('.') if '.' in said else said}{SPACE}%"
