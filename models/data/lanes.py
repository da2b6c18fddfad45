"""Text for truncated backpropagation: cut into lanes, the rows of each batch, and windows of steps.

    tokens  a b c d e f g h i j k l m      three lanes, windows of two:

    lane 0  a b|c d      inputs a b, targets b c;   then inputs c d, targets d e
    lane 1  e f|g h
    lane 2  i j|k l      m is left out, as it has no target

A rank reads its own lanes, and carries a recurrent network's state from window to window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Text(NamedTuple):
    """train, test: int64 [n], tokens below `vocabulary`; origin: names the source, for figures."""

    train: torch.Tensor
    test: torch.Tensor
    vocabulary: int
    origin: str


class Window(NamedTuple):
    """inputs, targets: int64 [lanes, steps]; a target is the token after its input."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Lanes(NamedTuple):
    """inputs, targets: int64 [lanes, steps in all]."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def windows(self, steps: int, first: int = 0) -> Iterator[Window]:
        """Yield windows of `steps`, from window `first` on; a partial one is left out."""
        for begin in range(first * steps, self.inputs.shape[1] - steps + 1, steps):
            part = slice(begin, begin + steps)
            yield Window(self.inputs[:, part], self.targets[:, part])

    def of_rank(self, rank: int, size: int) -> Lanes:
        """Return a rank's lanes; every rank gets the same number."""
        share = len(self.inputs) // size
        own = slice(rank * share, (rank + 1) * share)
        return Lanes(self.inputs[own], self.targets[own])


def cut(tokens: torch.Tensor, lanes: int) -> Lanes:
    """Cut a text into lanes of equal length; the remainder at its end is left out.

    Raises ValueError for a text that is too short.
    """
    steps = (len(tokens) - 1) // lanes
    if steps < 1:
        raise ValueError(f"{len(tokens)} tokens must be more than the {lanes} lanes of their text")
    used = lanes * steps
    return Lanes(tokens[:used].view(lanes, steps), tokens[1 : used + 1].view(lanes, steps))
