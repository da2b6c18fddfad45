"""Topology: how many ranks there are, and where this one sits."""

from __future__ import annotations

from ...world.world import current


def size() -> int:
    """Return the number of ranks."""
    return current().size


def rank() -> int:
    """Return this process's rank."""
    return current().rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().local_size


def local_rank() -> int:
    """Return this rank's index on its host."""
    return current().local_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return current().cross_size


def cross_rank() -> int:
    """Return the index of this host among them."""
    return current().cross_rank


def is_homogeneous() -> bool:
    """Tell whether every host has as many ranks."""
    return current().is_homogeneous
