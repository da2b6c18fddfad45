"""A step of one rank without any wait for the host: it can be captured in a CUDA graph.

Accumulate, select, clear: of one rank that is all of a gTop-k step, whose update are its picks.
Between ranks the host reads how many bytes come, and looks into each header: no exchange is in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...vector import Array, index_dtype
from ..gradients import Momentum, gradient_parts
from .machine import Machine, Scratch, blocks_for
from .selection import (
    FROM_DEVICE,
    OUTCOME_WORDS,
    Outcome,
    buffers,
    launch_selection,
    outcome,
)
from .source import instance


class Step:
    """Accumulate, select and clear, again and again, in the same memory, with the guess there too.

    Call it once before it is captured: kernels are compiled at their first launch. After each call
    or replay, the first `kept` entries of `indices` and `values`, [k] both, are the selection,
    and the residual has zeros in their place. A replay has the weight and the momentum's factor
    of the capture.

        step = Step(machine, residual.size, k, residual.dtype)
        step(residual, gradient)
        stream.begin_capture(); step(residual, gradient); graph = stream.end_capture()
        graph.launch()
    """

    def __init__(self, machine: Machine, length: int, k: int, dtype: Any) -> None:
        self.k = k
        self._scratch = Scratch(machine)
        self._search = buffers(self._scratch, length, k, dtype).candidates.search
        self.indices: Array = machine.empty(k, index_dtype(length))
        self.values: Array = machine.empty(k, dtype)
        self.kept: Array = self._search[:OUTCOME_WORDS][:1]  # uint64 [1], on the device

    def __call__(
        self,
        residual: Array,
        gradient: Array,
        momentum: Momentum | None = None,
        weight: float = 1.0,
    ) -> None:
        """Launch one step; the gradient is one array."""
        parts = gradient_parts(residual, gradient, self.k, momentum)
        launch_selection(
            self._scratch,
            residual,
            parts,
            self.k,
            FROM_DEVICE,
            self.indices,
            self.values,
            momentum,
            weight,
        )
        machine = self._scratch.machine
        machine.launch(
            instance("clear_first", residual.dtype, self.indices.dtype),
            blocks_for(machine, self.k),
            residual,
            self.indices,
            np.uint64(self.k),
            self.kept,
        )

    def outcome(self) -> Outcome:
        """Return what the last step found; waits for it."""
        return outcome(self._scratch.machine, self._search, self.values.dtype)
