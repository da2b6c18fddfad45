"""How far two texts are apart: insertions, deletions and replacements from one to the other."""

from __future__ import annotations

from collections.abc import Sequence


def edit_distance(said: Sequence[object], meant: Sequence[object]) -> int:
    """Return the fewest that turn one into the other (Levenshtein 1966)."""
    distances = list(range(len(meant) + 1))
    for row, one in enumerate(said, start=1):
        before, distances[0] = distances[0], row
        for column, other in enumerate(meant, start=1):
            cheapest = min(distances[column], distances[column - 1], before - (one == other))
            before, distances[column] = distances[column], cheapest + 1
    return distances[-1]
