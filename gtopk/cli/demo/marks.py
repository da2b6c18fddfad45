"""Marks: a method's line and its markers, of a shape of their own; page.css gives the colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..charts.svg import Point, line

MARKS = {  # 10 units wide around 0,0
    "dense": "M-4-4H4V4H-4Z",
    "topk": "M0-5.5L5 4H-5Z",
    "gtopk": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0Z",
    "gtopk-equal-bytes": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
}


def mark(method: str, at: Point) -> str:
    """Draw a method's marker, a shape of its own."""
    return (
        f'<path class="mark" transform="translate({at[0]:.1f} {at[1]:.1f})" d="{MARKS[method]}"/>'
    )


def series(method: str, points: Sequence[Point], marked: Iterable[Point], below: str = "") -> str:
    """Draw a method's line and markers, on top of `below` (its band)."""
    marks = "".join(mark(method, point) for point in marked)
    return f'<g class="{method}">{below}{line(points)}{marks}</g>'


def key(method: str) -> str:
    """Draw a method's line and marker as small as a word, for a legend."""
    return (
        f'<svg class="key {method}" viewBox="0 0 34 14" aria-hidden="true">'
        f"{line([(1, 7), (33, 7)])}{mark(method, (17, 7))}</svg>"
    )
