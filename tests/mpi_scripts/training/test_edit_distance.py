"""How far texts are apart: the definition, on all small ones."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from mpi_scripts.training.transcribe import edit_distance

TEXTS = st.text("ab ", max_size=6)


@cache
def defined(said: str, meant: str) -> int:
    if not said or not meant:
        return len(said) + len(meant)
    return min(
        defined(said[1:], meant) + 1,
        defined(said, meant[1:]) + 1,
        defined(said[1:], meant[1:]) + (said[0] != meant[0]),
    )


@given(TEXTS, TEXTS)
def test_it_is_the_fewest_changes(said: str, meant: str) -> None:
    assert edit_distance(said, meant) == defined(said, meant)
    assert edit_distance(said.split(), meant.split()) <= max(len(said.split()), len(meant.split()))


def test_words_count_as_letters_do() -> None:
    assert edit_distance("SITTING", "KITTEN") == 3
    assert edit_distance(["GO", "TO", "ONE"], ["GO", "ONE", "MORE"]) == 2
