"""Drains: ranks that drain within an epoch wait for those that have gone on to come there, too."""

from __future__ import annotations

from collections.abc import Sequence


def all_alike(said: Sequence[int], asked: bool, rank: int, counted: str, number: int) -> bool:
    """Tell whether all ranks drain, or all go on; if not, those that go on are to be asked.

    said: of every rank, whether it drains; asked: whether they were asked before.
    counted, number: what a script goes by, of its loader, and what that is.
    Raises RuntimeError, on every rank, where one goes on although it was asked to drain.
    """
    if len(set(said)) == 1:
        return True
    if asked:
        drained = [rank for rank, each in enumerate(said) if each]
        others = [rank for rank, each in enumerate(said) if not each]
        raise RuntimeError(
            f"rank {rank}: ranks {drained} called loader.drain() at {counted} {number}, and ranks "
            f"{others} did not; every rank must call it (or gtopk.save_checkpoint, which does) "
            f"after the first optimizer.step() that finds {counted} at, or above, the same number, "
            "or loader.drain_wanted"
        )
    return False
