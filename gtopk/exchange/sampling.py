"""Sampling: a fixed rule for the coordinates of the mean gradient that ranks exchange in a step.

Each parameter is cut into blocks of SWEEP coordinates, and each step takes one coordinate of every
block, so that SWEEP steps take each coordinate once. The starting coordinate differs from block to
block, so that no step takes a whole column of a matrix. No index is sent, and no memory of the
parameters' size is needed.

    step 0    . . x . | x . . . | . . . x | ...
    step 1    x . . . | . . x . | . x . . | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

SWEEP: Final = 240
_STRIDE: Final = 17  # from a step's place in a block to the next step's; coprime with SWEEP
_MULTIPLIER: Final = 2654435761  # Knuth's multiplicative hashing


class Sample(NamedTuple):
    """The coordinates of one step, all int64 on the host, [s].

    places: in the vector of all parameters side by side, ascending.
    numbers: of each coordinate's parameter. rows: of its row, counted over all parameters.
    """

    places: torch.Tensor
    numbers: torch.Tensor
    rows: torch.Tensor


class Sampling:
    """The samples of p parameters that lie side by side; `at` returns the sample of a step.

    sizes: elements of each parameter; rows: how many equal rows each is divided into.
    """

    def __init__(self, sizes: Sequence[int], rows: Sequence[int]) -> None:
        lengths, counts = np.array(sizes, np.int64), np.array(rows, np.int64)
        ends = lengths.cumsum()
        begins = ends - lengths
        self._row_length = np.maximum(lengths // counts, 1)
        # To be added to a place before it is divided by the row length.
        self._row_offset = (counts.cumsum() - counts) * self._row_length - begins
        self._blocks = -(-lengths // SWEEP)
        ends_of_blocks = self._blocks.cumsum()
        # The last block of a parameter may be shorter than SWEEP.
        self._filled = self._blocks > 0
        self._last, self._ends = ends_of_blocks[self._filled] - 1, ends[self._filled]
        within = np.arange(self._blocks.sum())
        within -= np.repeat(ends_of_blocks - self._blocks, self._blocks)
        self._block = np.repeat(begins, self._blocks) + within * SWEEP
        # Use the product's upper bits: the lower ones follow the block's number too closely.
        self._phase = (within * _MULTIPLIER % (1 << 32)) // (1 << 16) % SWEEP

    def at(self, steps: Sequence[int]) -> Sample:
        """Return the sample of a step.

        steps: for each parameter, the number of steps that have sampled it before.
        """
        moved = np.array(steps, np.int64) * _STRIDE % SWEEP
        # `repeat` is several times faster than indexing by each block's parameter.
        places = self._phase + np.repeat(moved, self._blocks)
        places -= SWEEP * (places >= SWEEP)
        places += self._block
        outside = places[self._last] >= self._ends
        places, counts = np.delete(places, self._last[outside]), self._blocks.copy()
        counts[self._filled] -= outside
        rows = places + np.repeat(self._row_offset, counts)
        rows //= np.repeat(self._row_length, counts)
        numbers = np.repeat(np.arange(len(counts)), counts)
        return Sample(*map(torch.from_numpy, (places, numbers, rows)))


def times_sampled(steps: int) -> int:
    """Return how often a coordinate was sampled in these steps, including the current sweep."""
    return -(-steps // SWEEP)
