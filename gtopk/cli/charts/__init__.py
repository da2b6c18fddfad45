"""Tables in text; the parts of plots, as SVG: axes, lines, bands, words; the page of reports.

Colours, dashes and font sizes are the page's: an element only says what it is (`line`, `band`), so
it follows light and dark by itself.

The page that reports share: one HTML file that needs no network, no script and no other file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Final


def aligned(rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows of cells as lines: the first `left` columns to the left, the others right."""
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


WIDTH, HEIGHT = 480, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 468, 34, 280  # the rectangle data is drawn in

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A straight or logarithmic way from data `low`..`high` to the drawing's `start`..`stop`."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where `value` lies in the drawing."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values inside the axis: 2 to 6, or the powers of ten of a long one."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            decades = math.log10(self.high / self.low)
            # Labels need less room above each other than side by side.
            room = 3 if self.stop < self.start else 2
            steps = (1,) if decades > room else (1, 2, 5)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            step = round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            values = [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        # Products of a step miss a bound by rounding, and its tick would be lost.
        slack = 1 + 1e-9
        return [v for v in values if self.low <= v * slack and v <= self.high * slack]


def horizontal(low: float, high: float, *, logarithmic: bool = False) -> Axis:
    """Return the x axis; a single value gets room around it."""
    return Axis(*widened(low, high, logarithmic), LEFT, RIGHT, logarithmic)


def vertical(low: float, high: float, *, logarithmic: bool = False) -> Axis:
    """Return the y axis; a single value gets room around it."""
    return Axis(*widened(low, high, logarithmic), BOTTOM, TOP, logarithmic)


def widened(low: float, high: float, logarithmic: bool) -> Point:
    """Return bounds that differ."""
    if low < high:
        return low, high
    if logarithmic:
        return low / 2, high * 2
    room = abs(low) / 2 or 0.5
    return low - room, high + room


def round_step(atleast: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is no less than `atleast`."""
    power = 10.0 ** math.floor(math.log10(atleast))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= atleast * (1 - 1e-9))


def drawing(description: str, parts: Iterable[str], height: int = HEIGHT) -> str:
    """Return the SVG element; `description` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(description)}">'
        + "".join(parts)
        + "</svg>"
    )


def clipped(parts: Iterable[str]) -> str:
    """Cut off what lies below the x axis; markers on the other three sides stay whole."""
    x, y, width, height = LEFT - 8, TOP - 8, RIGHT - LEFT + 16, BOTTOM - TOP + 8
    box = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<svg {box} viewBox="{x} {y} {width} {height}">' + "".join(parts) + "</svg>"


def frame(
    x: Axis, y: Axis, x_ticks: dict[float, str], y_ticks: dict[float, str], names: tuple[str, str]
) -> str:
    """Draw grid, ticks and the axes' names (x, y); the y name stands above its axis."""
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


def text(at: Point, content: str, kind: str) -> str:
    """Draw words; `kind` holds style classes, `middle` or `end` to anchor them there."""
    return f'<text class="{kind}" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(content)}</text>'


def line(points: Sequence[Point]) -> str:
    """Draw a line through points."""
    return f'<path class="line" d="M{path(points)}"/>'


def band(lower: Sequence[Point], upper: Sequence[Point]) -> str:
    """Draw the area between two lines."""
    return f'<path class="band" d="M{path(lower)}L{path(upper[::-1])}Z"/>'


def path(points: Sequence[Point]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def prose(words: str) -> str:
    """Return words as HTML that no line break tears "top-" from "k" in."""
    return re.sub("g?[Tt]op-k", r'<span class="whole">\g<0></span>', escape(words))


# The page loads nothing and runs nothing, whatever the texts in a record are.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, own_style: str, body: str) -> str:
    """Return the whole page; own_style: CSS for what the shared style does not know."""
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
{style}
{own_style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def facts(entries: Mapping[str, str]) -> str:
    """Return names and values in a list."""
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in entries.items()
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the legend: each key's drawing with its meaning."""
    items = "".join(f"<li>{drawn}{escape(words)}</li>" for drawn, words in entries)
    return f'<ul class="legend">{items}</ul>'


def figure(title: str, drawn: str, reading: str) -> str:
    """Return a figure: title, legend and drawing, and how to read it."""
    return (
        f'<figure><h3>{escape(title)}</h3><div class="drawn">{drawn}</div>'
        f"<figcaption><p>{prose(reading)}</p></figcaption></figure>"
    )


def plots(heading: str, figures: Sequence[str]) -> str:
    """Return figures below their heading."""
    drawn = "\n".join(figures)
    return f'<h2>{escape(heading)}</h2>\n<div class="plots">\n{drawn}\n</div>\n'


def tile(name: str, value: str, detail: str, loss: bool) -> str:
    """Return a figure at the head of a page."""
    return (
        f'<div class="{"tile loss" if loss else "tile"}"><dt>{escape(name)}</dt>'
        f'<dd class="value">{escape(value)}</dd><dd class="detail">{prose(detail)}</dd></div>'
    )


def hatches(striped: str, dotted: str) -> str:
    """Return patterns over the colours of two parts, so that parts differ without colour too."""
    return (
        f'<defs><pattern id="{striped}-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="ground" width="6" height="6"/>'
        '<rect class="stripe" width="3" height="6"/></pattern>'
        f'<pattern id="{dotted}-hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<rect class="ground" width="6" height="6"/><circle class="stripe" cx="3" cy="3" r="1.4"/>'
        "</pattern></defs>"
    )


def swatch(part: str) -> str:
    """Draw a part's colour, for a legend; its hatch is in the drawing."""
    return (
        '<svg class="key" viewBox="0 0 34 14" aria-hidden="true">'
        f'<rect class="{part}" width="34" height="14"/></svg>'
    )
