"""Text tables for terminals, SVG plots (axes, lines, bands, bars), and the reports' HTML page.

page.css sets colours, dashes and font sizes. An element only has a class (`line`, `band`), so that
it follows light and dark mode.

A report is one HTML file that needs no network, no script and no other file.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Final, NamedTuple, Protocol

from ...units import SPACE, bytes_text, seconds_text

_PLAIN: Final = str.maketrans(SPACE, " ")  # lines with plain spaces are easier to search and parse


def wrapped(text: str) -> list[str]:
    """Return a text as lines of at most 80 columns."""
    return [line.translate(_PLAIN) for line in textwrap.wrap(text, 80, break_on_hyphens=False)]


def aligned(rows: Iterable[Sequence[str]], left: int = 1, gap: int = 2) -> list[str]:
    """Format rows of cells as lines: left-align the first `left` columns, right-align the others.

    gap: spaces between columns.
    """
    rows = [[cell.translate(_PLAIN) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * gap)
        .join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]


WIDTH, HEIGHT = 480, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 468, 34, 280  # the plot area

Place = tuple[float, float]  # in the drawing


class Point(NamedTuple):
    """A position on the x axis, with the mean, minimum and maximum of the values there."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic map from data `low`..`high` to the drawing's `start`..`stop`."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the drawing coordinate of `value`."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values on the axis: 2 to 6, or powers of ten on a long logarithmic one."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            decades = math.log10(self.high / self.low)
            # Labels need less room vertically than horizontally.
            room = 3 if self.stop < self.start else 2
            steps = (1,) if decades > room else (1, 2, 5)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            step = round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            values = [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        # Tolerate rounding errors, or a tick on a bound would be dropped.
        slack = 1 + 1e-9
        return [v for v in values if self.low <= v * slack and v <= self.high * slack]


def horizontal(low: float, high: float, *, logarithmic: bool = False) -> Axis:
    """Return the x axis; a single value gets room around it."""
    return Axis(*widened(low, high, logarithmic), LEFT, RIGHT, logarithmic)


def vertical(low: float, high: float, *, logarithmic: bool = False) -> Axis:
    """Return the y axis; a single value gets room around it."""
    return Axis(*widened(low, high, logarithmic), BOTTOM, TOP, logarithmic)


def widened(low: float, high: float, logarithmic: bool) -> Place:
    """Return bounds that differ, with some room if they were equal."""
    if low < high:
        return low, high
    if logarithmic:
        return low / 2, high * 2
    room = abs(low) / 2 or 0.5
    return low - room, high + room


def round_step(atleast: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is >= `atleast`."""
    power = 10.0 ** math.floor(math.log10(atleast))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= atleast * (1 - 1e-9))


def drawing(description: str, parts: Iterable[str], height: int = HEIGHT) -> str:
    """Return the SVG element; description: the text for screen readers."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(description)}">'
        + "".join(parts)
        + "</svg>"
    )


def clipped(parts: Iterable[str]) -> str:
    """Clip the parts below the x axis, without cutting markers on the other three sides."""
    x, y, width, height = LEFT - 8, TOP - 8, RIGHT - LEFT + 16, BOTTOM - TOP + 8
    box = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<svg {box} viewBox="{x} {y} {width} {height}">' + "".join(parts) + "</svg>"


def frame(
    x: Axis, y: Axis, x_ticks: dict[float, str], y_ticks: dict[float, str], names: tuple[str, str]
) -> str:
    """Draw grid, ticks and the axes' names (x, y); the y name goes above its axis."""
    x_name, y_name = names
    parts = []
    for value, label in y_ticks.items():
        at = y.place(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>')
        parts.append(text((LEFT - 8, at + 4), label, "tick end"))
    for value, label in x_ticks.items():
        at = x.place(value)
        parts.append(f'<path class="axis" d="M{at:.1f} {BOTTOM}v5"/>')
        parts.append(text((at, BOTTOM + 20), label, "tick middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    parts.append(text((4, 14), y_name, "name"))
    parts.append(text((RIGHT, HEIGHT - 6), x_name, "name end"))
    return "".join(parts)


def text(at: Place, content: str, kind: str) -> str:
    """Draw words; kind: CSS classes, with `middle` or `end` to set the anchor."""
    return f'<text class="{kind}" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(content)}</text>'


def line(points: Sequence[Place]) -> str:
    """Draw a line through points."""
    return f'<path class="line" d="M{path(points)}"/>'


def band(lower: Sequence[Place], upper: Sequence[Place]) -> str:
    """Draw the area between two lines."""
    return f'<path class="band" d="M{path(lower)}L{path(upper[::-1])}Z"/>'


def path(points: Sequence[Place]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


class Formatter(Protocol):
    """Format a value with `count` digits."""

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


def share_text(share: float, count: int = 2) -> str:
    """Return a fraction as a percentage: 0.001 as "0.1 %"."""
    if share <= 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(100 * share)))
    percent = f"{100 * share:.{decimals}f}"
    return f"{percent.rstrip('0').rstrip('.') if '.' in percent else percent}{SPACE}%"


X_AXES: Final[Mapping[str, tuple[str, Formatter]]] = {
    "steps": ("step", steps_text),
    "epochs": ("epoch", steps_text),
    "samples": ("samples", steps_text),
    "time": ("time", seconds_text),
    "bytes": ("sent by a rank so far", bytes_text),
}
Lines = Mapping[str, Sequence[Point]]  # by name; without points, no line is drawn


def lines_plot(
    title: str,
    lines: Lines,
    y_name: str,
    *,
    over: str = "steps",
    to_text: Formatter = plain_text,
    logarithmic: bool = False,
    from_zero: bool = False,
    bands: bool = True,
    x: Axis | None = None,
    y: Axis | None = None,
) -> str:
    """Draw the lines, each in a band from minimum to maximum.

    x, y: axes; by default they span all points. Values below y's lower bound are clipped.
    """
    points = [point for each in lines.values() for point in each]
    x = x or horizontal(min(p.x for p in points), max(p.x for p in points))
    if y is None:
        low = min(p.low if bands else p.mean for p in points)
        high = max(p.high if bands else p.mean for p in points)
        y = _fitting(low, high, logarithmic, from_zero)
    drawn = []
    for place, each in enumerate(lines.values()):
        middle = [(x.place(p.x), y.place(p.mean)) for p in each]
        parts = [line(middle)]
        if len(middle) < 2:
            parts = [f'<circle class="bar" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in middle]
        if bands and len(each) > 1 and any(p.high > p.low for p in each):
            lower = [(x.place(p.x), y.place(max(p.low, y.low))) for p in each]
            upper = [(x.place(p.x), y.place(max(p.high, y.low))) for p in each]
            parts.insert(0, band(lower, upper))
        drawn.append(f'<g class="series-{place % 6}">{"".join(parts)}</g>')
    return drawing(title, [_axes(x, y, over, y_name, to_text), clipped(drawn)])


def _axes(x: Axis, y: Axis, over: str, y_name: str, to_text: Formatter) -> str:
    x_name, format_x = X_AXES[over]
    return frame(x, y, _ticks(x, format_x), _ticks(y, to_text), (x_name, y_name))


def _fitting(low: float, high: float, logarithmic: bool, from_zero: bool) -> Axis:
    """Return a y axis for values from `low` to `high`."""
    if logarithmic and low > 0:
        return vertical(low / 1.3, high * 1.3, logarithmic=True)
    room = 0.06 * (high - low)
    # Start at zero if that costs little room, so that the plot shows the value rather than its
    # noise; also for a constant, which has no range.
    near_zero = low >= 0 and (low < 0.3 * high or low == high)
    bottom = min(0.0, low) if from_zero or near_zero else low - room
    return vertical(bottom, high + room)


def _ticks(axis: Axis, to_text: Formatter) -> dict[float, str]:
    """Return an axis' ticks with distinct labels; for steps, whole numbers only."""
    values = [v for v in axis.ticks() if to_text is not steps_text or v == int(v)]
    labels = [to_text(value) if value else "0" for value in values]
    # Add digits until all labels differ; 17 distinguish any two floats.
    for count in range(4, 17):
        if len({*labels}) == len(labels):
            break
        labels = [to_text(value, count) if value else "0" for value in values]
    return dict(zip(values, labels, strict=True))


def lines_legend(lines: Lines) -> str:
    """Return the legend: a short sample of each line, and its name."""
    return legend(
        (
            f'<svg class="key series-{place % 6}" viewBox="0 0 34 14" aria-hidden="true">'
            f"{line([(1, 7), (33, 7)])}</svg>",
            name,
        )
        for place, (name, points) in enumerate(lines.items())
        if points
    )


def spans_factor(points: Sequence[Point], times: float) -> bool:
    """Tell whether a logarithmic axis suits: all means positive, and max > times * min."""
    positive = [p.mean for p in points if p.mean > 0]
    return len(positive) == len(points) and max(positive) > times * min(positive)


Parts = Mapping[str, float]  # seconds or a fraction, by part
ROW, BAR, SLIM_ROW, LETTER = 54, 16, 22, 7.0  # drawing units; LETTER: about the widest letter


def bars(title: str, rows: Sequence[tuple[str, Parts, str]], room: float = 62.0) -> str:
    """Draw a bar stacked by part for each row (name, seconds by part, words below the bar).

    room: width for the names.
    """
    # Avoid division by zero: a hook's step may take no time at all.
    scale = (WIDTH - room - 68) / (max(sum(parts.values()) for _, parts, _ in rows) or 1.0)
    longest = max(len(words) for *_, words in rows)
    height = ROW if longest else SLIM_ROW
    # Words too long to fit beside the names start at the left edge.
    indent = room if room + LETTER * longest <= WIDTH else 0.0
    drawn = [_HATCHES]
    for place, (name, parts, words) in enumerate(rows):
        top, left = place * height, room
        drawn.append(text((0, top + 13), name, "label"))
        for part, seconds in parts.items():
            width = seconds * scale
            # Thinner ones are invisible.
            if width >= 0.05:
                drawn.append(
                    f'<rect class="part {part}" x="{left:.2f}" y="{top}" width="{width:.2f}" '
                    f'height="{BAR}"/>'
                )
            left += width
        drawn.append(text((left + 6, top + 13), seconds_text(sum(parts.values())), "tick"))
        if words:
            drawn.append(text((indent, top + BAR + 16), words, "tick"))
    return drawing(title, drawn, height=len(rows) * height)


def stacked(
    title: str,
    found: Sequence[tuple[float, Parts]],
    y_name: str,
    *,
    over: str,
    to_text: Formatter,
    most: float,
) -> str:
    """Draw the parts over the x axis as stacked areas; most: the upper end of the y axis."""
    x, y = horizontal(found[0][0], found[-1][0]), vertical(0.0, most)
    places = [x.place(at) for at, _ in found]
    below = [0.0] * len(found)
    drawn = []
    for part in found[0][1]:
        above = [under + shown[part] for under, (_, shown) in zip(below, found, strict=True)]
        lower = [(at, y.place(value)) for at, value in zip(places, below, strict=True)]
        upper = [(at, y.place(value)) for at, value in zip(places, above, strict=True)]
        # Skip a part that takes no time: it would appear as a line.
        if any(high > low for high, low in zip(above, below, strict=True)):
            drawn.append(f'<path class="part {part}" d="M{path(lower)}L{path(upper[::-1])}Z"/>')
        below = above
    return drawing(title, [*drawn, _axes(x, y, over, y_name, to_text)])


def prose(words: str) -> str:
    """Return words as HTML without line breaks inside "top-k" and "gTop-k"."""
    return re.sub("g?[Tt]op-k", r'<span class="whole">\g<0></span>', escape(words))


# The page must not load or run anything, even if texts in a record are malicious.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: str) -> str:
    """Return the whole page."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


def facts(entries: Mapping[str, str]) -> str:
    """Return the settings of a run as names and values, with a heading."""
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in entries.items()
    )
    return f'<h2>What was run</h2>\n<dl class="facts">{listed}</dl>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the legend from pairs (drawing, meaning)."""
    items = "".join(f"<li>{drawn}{escape(words)}</li>" for drawn, words in entries)
    return f'<ul class="legend">{items}</ul>'


def figure(title: str, drawn: str, reading: str) -> str:
    """Return a figure; drawn: legend and drawing; reading: how to read it."""
    return (
        f'<figure><h3>{escape(title)}</h3><div class="drawn">{drawn}</div>'
        f"<figcaption><p>{prose(reading)}</p></figcaption></figure>"
    )


def plots(heading: str, figures: Sequence[str]) -> str:
    """Return figures with a heading."""
    drawn = "\n".join(figures)
    return f'<h2>{escape(heading)}</h2>\n<div class="plots">\n{drawn}\n</div>\n'


def table(rows: Mapping[str, Mapping[str, tuple[str, bool]]]) -> str:
    """Return a table from cells (text, whether it is a loss), by row and column."""
    columns = next(iter(rows.values()))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("Method", *columns))
    body = ""
    for label, row in rows.items():
        cells = "".join(
            f'<td data-column="{escape(name)}"{" class=loss" if loss else ""}>{escape(value)}</td>'
            for name, (value, loss) in row.items()
        )
        body += f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Tile(NamedTuple):
    """A key figure at the top of a page."""

    name: str
    value: str
    detail: str
    loss: bool = False


def tiles(found: Iterable[Tile]) -> str:
    """Return the key figures at the top of a page."""
    drawn = "".join(
        f'<div class="{"tile loss" if loss else "tile"}"><dt>{escape(name)}</dt>'
        f'<dd class="value">{escape(value)}</dd><dd class="detail">{prose(detail)}</dd></div>'
        for name, value, detail, loss in found
    )
    return f'<dl class="tiles">{drawn}</dl>'


# Hatch two parts, so that readers can distinguish parts without colour.
_HATCHES: Final = (
    '<defs><pattern id="wait-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="ground" width="6" height="6"/>'
    '<rect class="stripe" width="3" height="6"/></pattern>'
    '<pattern id="exchange-hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect class="ground" width="6" height="6"/><circle class="stripe" cx="3" cy="3" r="1.4"/>'
    "</pattern></defs>"
)


def parts_legend(names: Mapping[str, str]) -> str:
    """Return the legend of parts; the page must also contain a drawing with their hatches."""
    return legend(
        (
            '<svg class="key" viewBox="0 0 34 14" aria-hidden="true">'
            f'<rect class="part {part}" width="34" height="14"/></svg>',
            name,
        )
        for part, name in names.items()
    )
