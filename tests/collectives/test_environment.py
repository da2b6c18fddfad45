"""Environment variables give numbers, or an error that shows their value."""

from __future__ import annotations

import re

import pytest

from collectives.environment import whole_number


@pytest.mark.parametrize("environ", [{}, {"WAIT": ""}])
def test_without_a_word_it_is_the_default(environ: dict[str, str]) -> None:
    assert whole_number("WAIT", 9, "steps", environ) == 9
    assert whole_number("WAIT", 0, "steps", environ) == 0


def test_zero_is_a_number_where_it_may_be() -> None:
    assert whole_number("WAIT", 9, "steps", {"WAIT": "0"}, least=0) == 0


@pytest.mark.parametrize("text", ["1", "-3", "2.0", "2e0", "²", "soon"])
def test_anything_but_a_whole_number_is_refused(text: str) -> None:
    said = f"KEEP must be a whole number of commits, at least 2, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        whole_number("KEEP", 9, "commits", {"KEEP": text}, least=2)


@pytest.mark.parametrize("environ", [{}, {"SIZE": ""}])
def test_a_variable_without_a_default_is_required(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="SIZE must be a whole number of ranks, at least 1, got "):
        whole_number("SIZE", None, "ranks", environ)


def test_a_number_may_have_no_unit() -> None:
    with pytest.raises(ValueError, match="PORT must be a whole number, at least 1, got 'http'"):
        whole_number("PORT", None, environ={"PORT": "http"})
