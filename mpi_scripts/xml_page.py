"""The page of `train_xml.py`: P@1 over time and over samples, one line for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gtopk.cli import charts
from gtopk.units import digits

AT: Final = (1, 3, 5)


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
    along: dict[str, Callable[[Point], float]] = {
        "time": lambda point: point.seconds,
        "samples": lambda point: point.samples,
    }
    best = max(point.precisions[1] for curve in curves for point in curve.points)
    figures = [plot(curves, over, place) for over, place in along.items()]
    return charts.page(
        title,
        f"""<p class="lead">Seconds are wall-clock seconds of training, without evaluations.</p>
{charts.plots("P@1", figures)}<h2>All methods</h2>
{charts.table({curve.label: cells_of(curve, best / 2) for curve in curves})}
{charts.facts({name: str(value) for name, value in facts.items()})}""",
    )


def plot(curves: Sequence[Curve], over: str, place: Callable[[Point], float]) -> str:
    """Return a figure of each method's P@1."""
    lines = {
        curve.label: [
            charts.Point(place(point), share, share, share)
            for point in curve.points
            for share in [point.precisions[1]]
        ]
        for curve in curves
    }
    title = f"P@1 over {over}"
    drawn = charts.lines_plot(
        title, lines, "P@1", over=over, to_text=charts.share_text, from_zero=True
    )
    return charts.figure(title, charts.lines_legend(lines) + drawn, "One line per method.")


def cells_of(curve: Curve, half: float) -> dict[str, tuple[str, bool]]:
    """Return a method's final results, and when it first had half of the best P@1."""
    last = curve.points[-1]
    reached = [point.seconds for point in curve.points if point.precisions[1] >= half]
    cells = {f"P@{k}": f"{100 * last.precisions[k]:.2f} %" for k in AT}
    cells["Seconds"] = digits(last.seconds)
    cells[f"Seconds to P@1 of {100 * half:.1f} %"] = digits(reached[0]) if reached else "never"
    return {column: (value, False) for column, value in cells.items()}
