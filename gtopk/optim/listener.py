"""Listener: what a distributed optimizer tells of its steps. This one does nothing with it."""

from __future__ import annotations

from ..runtime.world.state import World


class Listener:
    """Is told by an optimizer; a subclass does something with it."""

    def enter(self, here: World) -> None:
        """The next step is the first one in another world."""

    def end_step(self) -> None:
        """A step has been taken, or skipped on all ranks."""

    def drop(self) -> None:
        """Gradients are cleared; those that were synchronized are not stepped with any more."""
