"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or found; the same on every rank, so that all may go on."""


class DamagedError(ValueError):
    """A file does not hold what was written to it; the text names it and says why."""


class FormatError(ValueError):
    """A file is whole, and of a format that this version does not read."""
