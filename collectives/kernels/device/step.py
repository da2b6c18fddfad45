"""A selection without any wait for the host: it can be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

from ...vector import Array, index_dtype
from ..gradients import Momentum, gradient_parts
from .machine import Machine, Scratch
from .selection import (
    FROM_DEVICE,
    OUTCOME_WORDS,
    Outcome,
    buffers,
    launch_selection,
    outcome,
)


class Step:
    """Accumulate and select, again and again, in the same memory; the guess stays on the device.

    Call it once before it is captured: kernels are compiled at their first launch. After each call
    or replay, the first `kept` entries of `indices` and `values`, [k] both, are the selection.

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
        )

    def outcome(self) -> Outcome:
        """Return what the last step found; waits for it."""
        return outcome(self._scratch.machine, self._search, self.values.dtype)
