"""The page of `train_xml.py`: P@1 over time and over samples, one line for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from gtopk.cli.charts import drawing, frame, horizontal, line, text, vertical
from gtopk.units import count_text, digits

AT: Final = (1, 3, 5)
COLOURS: Final = ("#0072b2", "#cf5b00", "#00875f", "#a35a8f", "#7a8590", "#b98500")
STYLE: Final = """
:root { color-scheme: light dark; }
body { max-width: 820px; margin: 0 auto; padding: 40px 20px; font: 16px/1.5 system-ui, sans-serif; }
svg { width: 100%; height: auto; }
svg text { fill: GrayText; font-size: 12px; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.grid { stroke: GrayText; stroke-opacity: 0.3; fill: none; }
.axis { stroke: GrayText; fill: none; }
.line { fill: none; stroke: currentColor; stroke-width: 2; }
g text { fill: currentColor; }
th, td { padding: 0 1.5em 0 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
"""


class Point(NamedTuple):
    """An evaluation; seconds: of training, without evaluations; samples: on all ranks."""

    seconds: float
    samples: int
    precisions: Mapping[int, float]


class Curve(NamedTuple):
    """A method's name and its evaluations over time."""

    label: str
    points: Sequence[Point]

    def record(self) -> dict[str, Any]:
        return {"label": self.label, "points": [point._asdict() for point in self.points]}


def page(facts: Mapping[str, Any], curves: Sequence[Curve]) -> str:
    """Return a self-contained HTML file.

    facts: the description of the run; "data", the source of the rows, is in the title.
    """
    title = f"P@1 over time: {facts['data']}, {facts['ranks']} ranks"
    said = "".join(f"<li>{escape(name)}: {escape(str(value))}" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<h1>{escape(title)}</h1>
<p>Seconds are wall-clock seconds of training, without evaluations.</p>
{plot(curves, "seconds", lambda point: point.seconds)}
{plot(curves, "samples", lambda point: point.samples)}
{table(curves)}
<ul>{said}</ul>
</html>
"""


def plot(curves: Sequence[Curve], name: str, along: Callable[[Point], float]) -> str:
    """Return a plot of each method's P@1."""
    x = horizontal(0.0, max(along(curve.points[-1]) for curve in curves))
    y = vertical(0.0, max(point.precisions[1] for curve in curves for point in curve.points))
    lines = []
    for number, curve in enumerate(curves):
        places = [(x.place(along(point)), y.place(point.precisions[1])) for point in curve.points]
        label = text((places[-1][0] - 4, places[-1][1] - 5), curve.label, "end")
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<g style="color: {colour}">{line(places)}{label}</g>')
    x_ticks = {value: count_text(value) if value >= 1 else f"{value:g}" for value in x.ticks()}
    y_ticks = {value: f"{100 * value:.3g} %" for value in y.ticks()}
    axes = frame(x, y, x_ticks, y_ticks, (name, "P@1"))
    return drawing(f"P@1 over {name}, one line per method", [axes, *lines])


def table(curves: Sequence[Curve]) -> str:
    """Return each method's final results, and when it first reached half of the best P@1."""
    best = max(point.precisions[1] for curve in curves for point in curve.points)
    rows = [
        "<tr><th>method"
        + "".join(f"<th>P@{k}" for k in AT)
        + f"<th>seconds<th>seconds to P@1 of {100 * best / 2:.1f} %"
    ]
    for curve in curves:
        last = curve.points[-1]
        reached = [point.seconds for point in curve.points if point.precisions[1] >= best / 2]
        cells = [f"{100 * last.precisions[k]:.2f} %" for k in AT]
        cells += [digits(last.seconds), digits(reached[0]) if reached else "never"]
        rows.append(f"<tr><td>{escape(curve.label)}" + "".join(f"<td>{cell}" for cell in cells))
    return f"<table>{''.join(rows)}</table>"
