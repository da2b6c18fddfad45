"""Unfinished: what all ranks have under way together, and finish before they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..engine import Engine


class Unfinished(Protocol):
    """Something that every rank has under way, or none."""

    def is_ready(self) -> bool:
        """Tell whether this rank's part is done, so that `begin` would not wait."""

    def begin(self, engine: Engine) -> Callable[[], None]:
        """Submit what finishes it, which runs once all ranks have; return what ends it.

        That is called once this rank has left, and raises what went wrong.
        """
