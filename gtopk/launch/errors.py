"""What keeps ranks from being started."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """Ranks cannot be started here."""


class LaunchTimeoutError(LaunchError):
    """The ranks ran longer than allowed, and have been ended."""
