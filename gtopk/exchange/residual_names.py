"""Names of the residual: matches saved names with this run's, and warns of those without a match.

torch.compile adds `_orig_mod` to the names of all that it wraps: a compiled run may go on from one
that was not, and the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from .residual_state import ResidualState

_log = logging.getLogger("gtopk")
_COMPILED: Final = "_orig_mod"


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def translate(saved: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return, by saved name, the name in this run; the saved name where there is none."""
    by_plain_name = {plain_name(name): name for name in known}
    here = {
        name: name if name in known else by_plain_name.get(plain_name(name), name) for name in saved
    }
    # Never two under one name: a saved name that is known exactly wins.
    return {name: name if other in saved else other for name, other in here.items()}


def under_known_names(
    residuals: Mapping[str, ResidualState], known: Collection[str]
) -> dict[str, ResidualState]:
    """Return the residual by this run's names; names without a match stay as they are."""
    here = translate(residuals.keys(), known)
    return {here[name]: parts for name, parts in residuals.items()}


def unmatched(
    residuals: Mapping[str, ResidualState], known: Collection[str], rank: int, why: str
) -> dict[str, ResidualState]:
    """Return residuals whose names no parameter has, to be saved again, and warn of them.

    why: ends the warning: the reason, and what to do.
    """
    found = {
        name: parts
        for name, parts in residuals.items()
        if name not in known and any(bool(tensor.any()) for tensor in parts.values())
    }
    if found:
        named = ", ".join(map(repr, sorted(found)[:5])) + ", ..." * (len(found) > 5)
        _log.warning(
            "rank %d: residuals for %s are kept but cannot be applied: %s", rank, named, why
        )
    return found
