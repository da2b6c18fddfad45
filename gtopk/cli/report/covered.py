"""Covered: what a recorded step is, in words, where it is not a step of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MEANINGS: Final[Mapping[str, str]] = {
    "round": "A round, the step of this mode, is the micro-batches that a rank adds up while the "
    "round before is reduced, and its own reduction, which is to be over when the next round is. ",
    "outer step": "An outer step is the steps that a rank has made by itself, and the exchange of "
    "what they have changed. ",
    "mega-batch": "A mega-batch is the batches that a rank has taken while there were any, a local "
    "step with each, and the merge of all ranks' replicas. ",
    "period": "A period is what a worker has done in a quarter of a second, with no less than a "
    "batch, or in the rest of an epoch. ",
}
WAITS: Final[Mapping[str, str]] = {
    "round": "wait is for the other ranks to be ready, and, where nothing is left to compute, for "
    "the update",
    "mega-batch": "wait is to be told the next samples, for slower ranks, and for the merge's turn",
    "period": "wait is for the other workers to end their epoch",
}
ALONE: Final = ("mega-batch", "period")  # of which each rank makes as many as it can


def several(covers: str, count: int = 2) -> str:
    """Return the word for so many of them."""
    if count == 1:
        return covers
    return f"{covers}{'es' if covers.endswith('ch') else 's'}"


def a(covers: str) -> str:
    """Return the word with its article."""
    return f"{'an' if covers[0] in 'aeiou' else 'a'} {covers}"
