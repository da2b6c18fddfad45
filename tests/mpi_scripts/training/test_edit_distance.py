"""The edit distance of texts equals its recursive definition on small texts."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from mpi_scripts.training.transcribe import edit_distance

TEXTS = st.text("ab ", max_size=6)


@cache
def defined(first: str, second: str) -> int:
    if not first or not second:
        return len(first) + len(second)
    return min(
        defined(first[1:], second) + 1,
        defined(first, second[1:]) + 1,
        defined(first[1:], second[1:]) + (first[0] != second[0]),
    )


@given(TEXTS, TEXTS)
def test_edit_distance_is_the_fewest_changes(first: str, second: str) -> None:
    assert edit_distance(first, second) == defined(first, second)
    assert edit_distance(first.split(), second.split()) <= max(
        len(first.split()), len(second.split())
    )


def test_edit_distance_counts_words_or_letters() -> None:
    assert edit_distance("SITTING", "KITTEN") == 3
    assert edit_distance(["GO", "TO", "ONE"], ["GO", "ONE", "MORE"]) == 2
