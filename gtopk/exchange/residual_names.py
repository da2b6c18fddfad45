"""Names of the residual: whose they are in this run, and a warning of those that are nobody's.

What torch.compile wraps is called `_orig_mod`, in the names of all that is in it: a run may be
compiled that goes on from one that was not, and the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from .residual_state import ResidualState

_log = logging.getLogger("gtopk")
_COMPILED: Final = "_orig_mod"


def plain_name(name: str) -> str:
    """Return the name that this has where nothing is compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def translate(saved: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return, by name that was saved, what it is called here; itself where nothing is."""
    by_plain_name = {plain_name(name): name for name in known}
    here = {
        name: name if name in known else by_plain_name.get(plain_name(name), name) for name in saved
    }
    # Never two under one name: that of its own is the older right.
    return {name: name if other in saved else other for name, other in here.items()}


def under_known_names(
    residuals: Mapping[str, ResidualState], known: Collection[str]
) -> dict[str, ResidualState]:
    """Return the residual by the names that are known here, and by others as they are."""
    here = translate(residuals.keys(), known)
    return {here[name]: parts for name, parts in residuals.items()}


def unmatched(
    residuals: Mapping[str, ResidualState], known: Collection[str], rank: int, why: str
) -> dict[str, ResidualState]:
    """Return the residual of names that nobody has, and warn of it; it is to be saved again.

    why: nobody has them, and the way out.
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
