"""Dealing: micro-batches are dealt to the ranks by speed; who runs out first has all dealt anew.

pass 0   rank 0 |###############|   dealt by the speeds of the pass before; it ends
         rank 1 |######..|          when one rank has none left
pass 1   rank 0 |##|                the rest, dealt by the speeds of pass 0
         rank 1 |.|                 until nothing is left: every sample once an epoch
"""

from __future__ import annotations

from collections.abc import Sequence

from .shares import Limits, whole


def deal(count: int, speeds: Sequence[int]) -> list[range]:
    """Return which of `count` batches each rank gets, side by side, in proportion to its speed."""
    total = sum(speeds)
    shares = whole(
        [count * speed / total for speed in speeds],
        Limits(count, [0] * len(speeds), [count] * len(speeds)),
    )
    firsts = [sum(shares[:rank]) for rank in range(len(shares))]
    return [range(first, first + share) for first, share in zip(firsts, shares, strict=True)]


def left_over(dealt: Sequence[range], done: Sequence[int]) -> list[int]:
    """Return the places of the batches that nobody has computed, in order."""
    return [place for places, n in zip(dealt, done, strict=True) for place in places[n:]]


def speeds_after(done: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the speeds that a pass has shown; a short one shows nothing."""
    if sum(done) < 4 * len(done):
        return list(before)
    return [max(1, n) for n in done]
