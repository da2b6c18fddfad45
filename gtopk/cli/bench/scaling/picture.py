"""Picture: every contender's efficiency on every number of ranks, the published ones beside it.

vgg16, 4 ranks
ssgd            ====<>                  12.1 %   1.0 s
gtopk           =============           41 %     0.3 s     3.4 times ssgd
gtopk-tree      ========= <>            31 %     0.4 s

=== a worker's step alone over the step; <> published
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from ....units import percent_text, seconds_text
from ...charts.svg import Axis, text
from ..collectives.picture import STYLE
from .record import Record, Results
from .report import by_model, facts, over_baseline

WIDTH: Final = 1000
LEFT, RIGHT, VALUES = 150, 620, 640  # where efficiencies are drawn, and told
ROW, HEAD, AXIS, GAP, TOP = 24, 34, 30, 22, 120

_MORE: Final = """
.bar { fill: var(--ink); opacity: 0.75; }
.published { fill: var(--ground); stroke: var(--text); stroke-width: 1.5; }
"""


def picture(runs: Sequence[Results]) -> str:
    """Return the SVG file's text."""
    axis = Axis(0.0, 1.0, LEFT, RIGHT)
    parts: list[str] = []
    y = TOP
    for model, same in by_model(runs).items():
        for run in same:
            parts.append(text((20, y + 14), f"{model}, {run['ranks']} ranks", "case"))
            y += HEAD
            rows = [r for r in run["records"] if r["contender"] != "alone"]
            parts += _grid(axis, y, y + ROW * len(rows))
            for row in rows:
                parts += _row(row, run["records"], axis, y + ROW / 2)
                y += ROW
            y += AXIS + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="{escape(_DESCRIBED)}"><style>{STYLE}{_MORE}</style>'
        f'<rect class="ground" width="{WIDTH}" height="{y}"/>'
        + "".join([*_head(runs[0]), *parts])
        + "</svg>\n"
    )


_DESCRIBED: Final = "Scaling efficiency of each way to train, by model and number of ranks"


def _head(run: Results) -> Iterator[str]:
    yield text((20, 34), "Scaling efficiency: one worker's step over the step of all", "title")
    compute = "emulated compute, " if run["emulated_compute"] else ""
    yield text((20, 56), f"{compute}{facts(run)[1].partition('; ')[2]}", "fact")
    yield text((20, 73), facts(run)[2], "fact")
    for x, kind, words in ((26, "ours", "gtopk"), (110, "baseline", "others")):
        yield f'<g class="{kind}"><rect class="bar" x="{x - 6}" y="86" width="14" height="12"/></g>'
        yield text((x + 14, 97), words, "fact")
    yield _diamond(206, 92)
    yield text((218, 97), "published: 1 Gbit/s, 2019", "fact")


def _grid(axis: Axis, top: float, bottom: float) -> Iterator[str]:
    for value in axis.ticks():
        at = axis.place(value)
        yield f'<path class="grid" d="M{at:.1f} {top:.1f}V{bottom + 5:.1f}"/>'
        yield text((at, bottom + 20), f"{value:.0%}", "tick middle")


def _row(row: Record, rows: Sequence[Record], axis: Axis, y: float) -> Iterator[str]:
    width = axis.place(row["efficiency"]) - LEFT
    kind = "ours" if row["ours"] else "baseline"
    yield text((LEFT - 12, y + 4), row["contender"], "end")
    yield (
        f'<g class="{kind}"><rect class="bar" x="{LEFT}" y="{y - 7:.1f}" width="{width:.1f}" '
        'height="14"/></g>'
    )
    if row["published"] is not None:
        yield _diamond(axis.place(row["published"]), y)
    words = [(0, percent_text(row["efficiency"])), (80, seconds_text(row["seconds"]["median"]))]
    if (over := over_baseline(row, rows)) is not None:
        words.append((170, f"{over:.2f} times ssgd"))
    for offset, word in words:
        yield text((VALUES + offset, y + 4), word, "value")


def _diamond(x: float, y: float) -> str:
    return f'<path class="published" d="M{x - 6:.1f} {y:.1f}l6-6l6 6l-6 6z"/>'
