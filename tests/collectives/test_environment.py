"""Variables give the numbers that are asked for, and one error says what else they give."""

from __future__ import annotations

import re

import pytest

from collectives.environment import number, whole_number


@pytest.mark.parametrize("text", ["2.5", "25e-1", " 2.5 "])
def test_a_number_is_as_the_variable_says(text: str) -> None:
    assert number("WAIT", 9.0, "seconds", {"WAIT": text}) == 2.5


@pytest.mark.parametrize("environ", [{}, {"WAIT": ""}])
def test_without_a_word_it_is_the_default(environ: dict[str, str]) -> None:
    assert number("WAIT", 9.0, "seconds", environ) == 9.0
    assert whole_number("WAIT", 9, "steps", environ) == 9
    assert whole_number("WAIT", 0, "steps", environ) == 0


def test_zero_is_a_number_where_it_may_be() -> None:
    assert number("WAIT", 9.0, "seconds", {"WAIT": "0"}, may_be_zero=True) == 0.0
    assert number("WAIT", 0.0, "seconds", {}, may_be_zero=True) == 0.0
    assert whole_number("WAIT", 9, "steps", {"WAIT": "0"}, least=0) == 0


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e999"])
def test_what_is_no_number_above_0_is_refused(text: str) -> None:
    said = f"WAIT must be a number of seconds above 0, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        number("WAIT", 9.0, "seconds", {"WAIT": text})


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_what_is_no_number_of_at_least_0_is_refused(text: str) -> None:
    said = f"WAIT must be a number of seconds, at least 0, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        number("WAIT", 9.0, "seconds", {"WAIT": text}, may_be_zero=True)


@pytest.mark.parametrize("text", ["1", "-3", "2.0", "2e0", "²", "soon"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    said = f"KEEP must be a whole number of commits, at least 2, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        whole_number("KEEP", 9, "commits", {"KEEP": text}, least=2)


@pytest.mark.parametrize("environ", [{}, {"SIZE": ""}])
def test_what_has_no_default_is_required(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="SIZE must be a whole number of ranks, at least 1, got "):
        whole_number("SIZE", None, "ranks", environ)


def test_what_has_no_unit_is_a_plain_number() -> None:
    with pytest.raises(ValueError, match="PORT must be a whole number, at least 1, got 'http'"):
        whole_number("PORT", None, environ={"PORT": "http"})
