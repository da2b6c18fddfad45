"""Environment variables give numbers, or an error that shows their value."""

from __future__ import annotations

import re

import pytest

from collectives.environment import whole_number
from tests.started import under


@pytest.mark.parametrize("environ", [{}, {"WAIT": ""}])
def test_unset_variable_gives_the_default(environ: dict[str, str]) -> None:
    assert under(environ, whole_number, "WAIT", 9, "steps") == 9
    assert under(environ, whole_number, "WAIT", 0, "steps") == 0


def test_zero_is_accepted_when_allowed() -> None:
    assert under({"WAIT": "0"}, whole_number, "WAIT", 9, "steps", least=0) == 0


@pytest.mark.parametrize("text", ["1", "-3", "2.0", "2e0", "²", "soon"])
def test_value_that_is_not_a_whole_number_in_range_is_refused(text: str) -> None:
    message = f"KEEP must be a whole number of commits, at least 2, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        under({"KEEP": text}, whole_number, "KEEP", 9, "commits", least=2)


@pytest.mark.parametrize("environ", [{}, {"SIZE": ""}])
def test_unset_variable_without_a_default_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="SIZE must be a whole number of ranks, at least 1, got "):
        under(environ, whole_number, "SIZE", None, "ranks")


def test_error_message_without_a_unit_names_the_variable() -> None:
    with pytest.raises(ValueError, match="PORT must be a whole number, at least 1, got 'http'"):
        under({"PORT": "http"}, whole_number, "PORT", None)
