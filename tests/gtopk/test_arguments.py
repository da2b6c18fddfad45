"""Options of numbers are finite, and within what they mean."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import pytest

from gtopk.arguments import number_in

PARSERS = [
    *("plan.command", "simulate.command", "top.command"),
    *(f"bench.{what}.command" for what in ("collectives", "optimizer", "scaling", "selection")),
    "bench.wire.command",
]


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", ["1e-320", "0.5", "1"], ["0", "-0.0", "1.1", "-1", "nan", "inf", "", "half"]),
        ("[0, 1)", ["0", "0.99"], ["1", "-1e-9", "nan", "-inf"]),
        ("[1, inf)", ["1", "1e308"], ["0.9", "inf", "1e999", "nan"]),
    ],
)
def test_an_interval_holds_what_it_says(
    interval: str, inside: list[str], outside: list[str]
) -> None:
    read = number_in(interval)
    assert [read(text) for text in inside] == [float(text) for text in inside]
    for text in outside:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            read(text)
        assert str(raised.value) == f"must lie in {interval}, got {text!r}"


@pytest.mark.parametrize("place", PARSERS)
def test_no_option_of_a_command_takes_what_is_not_finite(place: str) -> None:
    actions: Any = importlib.import_module(f"gtopk.{place}").parser()._actions
    numbers = 0
    for action in actions:
        for unit in ("", "s", "gbit"):
            if action.type is None or not is_number(action.type, f"1{unit}"):
                continue
            numbers += 1
            for text in ("nan", "inf", "-1", "1e999"):
                assert not is_number(action.type, text + unit), (action.dest, text + unit)
    assert numbers


def is_number(read: Any, text: str) -> bool:
    """Tell whether an option takes this, and as a number with a fraction."""
    try:
        return isinstance(read(text), float)
    except (argparse.ArgumentTypeError, ValueError):
        return False
