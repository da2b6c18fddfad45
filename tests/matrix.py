"""The matrix: combinations of which the suite runs a few and `make test-matrix` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(every: Iterable[Any], *suite: Any) -> list[Any]:
    """Return the parameters of a test; those that are not in `suite` get the mark `matrix`.

    Starting ranks takes seconds each time, so rarer combinations only run on request.
    """
    chosen = list(every)
    assert all(each in chosen for each in suite)
    return [
        each if each in suite else pytest.param(*_values(each), marks=pytest.mark.matrix)
        for each in chosen
    ]


def _values(each: Any) -> tuple[Any, ...]:
    """Return the values of a combination: a tuple holds several."""
    return each if isinstance(each, tuple) else (each,)
