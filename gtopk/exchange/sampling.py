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

import torch

SWEEP: Final = 60
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
        # Name the device everywhere: a script may have changed torch's default device.
        lengths = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        self._ends = lengths.cumsum(0)
        self._begins = self._ends - lengths
        counts = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._first_row = counts.cumsum(0) - counts
        self._row_length = (lengths // counts).clamp_min(1)
        blocks = -(-lengths // SWEEP)
        self._number = torch.arange(len(sizes), device="cpu").repeat_interleave(blocks)
        within = torch.arange(len(self._number), device="cpu")
        within -= (blocks.cumsum(0) - blocks)[self._number]
        self._block = self._begins[self._number] + within * SWEEP
        # Use the product's upper bits: the lower ones follow the block's number too closely.
        self._phase = (within * _MULTIPLIER % (1 << 32)) // (1 << 16) % SWEEP

    def at(self, steps: Sequence[int]) -> Sample:
        """Return the sample of a step.

        steps: for each parameter, the number of steps that have sampled it before.
        """
        sampled = torch.tensor(steps, dtype=torch.int64, device="cpu")[self._number]
        places = self._block + (self._phase + _STRIDE * sampled) % SWEEP
        # The last block of a parameter may be shorter than SWEEP.
        inside = places < self._ends[self._number]
        places, numbers = places[inside], self._number[inside]
        rows = (places - self._begins[numbers]) // self._row_length[numbers]
        return Sample(places, numbers, self._first_row[numbers] + rows)


def times_sampled(steps: int) -> int:
    """Return how often a coordinate was sampled in these steps, including the current sweep."""
    return -(-steps // SWEEP)
