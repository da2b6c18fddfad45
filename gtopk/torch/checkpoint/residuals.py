"""Residuals on other ranks: those of ranks that are no more go to the ranks that there are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

from ...optim.wrapped import checkpoint as optimizer_checkpoint
from ..functions import allgather_object
from ..mpi_ops import rank, size


def share(parts: Mapping[int, Any], saved: int, is_missing: bool = False) -> Any | None:
    """Return what this rank's optimizer loads under optimizer_checkpoint.KEY; None: nothing.

    parts: of the ranks whose residuals this one takes over, those that there are.
    saved: how many ranks there were.
    is_missing: what this rank had is lost; its residual is zero, in the same buckets as others.
    All ranks call it together: one that has no part learns from the others which buckets there
    were.
    """
    mine = [optimizer_checkpoint.frame(part) for part in islice(parts.values(), 1)]
    frames = allgather_object(mine, "checkpoint.frames")
    frame = next(chain(mine, *frames), None)
    if frame is None or (not parts and saved == size() and not is_missing):
        return None  # a plain optimizer's, or one of ranks that this one is none of
    return optimizer_checkpoint.summed(frame, parts, rank(), size())
