"""Checks of the options of an algorithm: the further keyword arguments of its `reduce`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def check_names(algorithm: str, reduce: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise ValueError unless the algorithm has all the options."""
    parameters = _parameters(reduce)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # it passes them on to another algorithm, where they are checked
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "format"]
    unknown = sorted(set(options) - set(own))
    if unknown:
        raise ValueError(
            f"algorithm {algorithm!r} has no option {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(own) or 'none'}"
        )


@functools.cache
def _parameters(reduce: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of an algorithm; cached, as every reduction needs them."""
    return list(inspect.signature(reduce).parameters.values())
