"""Accumulate and select of one residual, step after step: after the first, one launch of a graph.

    step 1            launch, launch, launch, launch       kernels are compiled, the guess is made
    step 2            the same, captured
    from then on      replay                               a launch instead of four

Everything that changes from step to step lies in device memory: the weight, the momentum's factor,
the guess, the addresses of the gradients. The host waits only for the number of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...vector import Array, Gradient, Momentum, SparseVector, gradient_parts, index_dtype
from .machine import Machine, Scratch, located
from .selection import FROM_DEVICE, Addition, buffers, finish, launch_selection, prepare

# A residual and its other buffer take turns, so two are in use; a few more while one grows.
MOST_GRAPHS: Final = 8


class Step:
    """Accumulate and select, again and again, in memory of its own.

        step = Step(machine, residual.size, k, residual.dtype)
        picked, threshold = step(residual, gradient, weight=0.25, threshold=threshold)

    The entries that a call returns lie in this memory: the next call overwrites them.

    threshold: the threshold that the last call returned.
    """

    def __init__(self, machine: Machine, length: int, k: int, dtype: Any) -> None:
        """length: of the residual; k: entries to select; dtype: float32 or float64."""
        self.k = k
        self._machine = machine
        self._scratch = Scratch(machine)
        self._memory = buffers(self._scratch, length, k, np.dtype(dtype))
        self._chosen = SparseVector(
            machine.empty(k, index_dtype(length)), machine.empty(k, dtype), length
        )
        self.threshold = 0.0
        self._graphs: dict[tuple[object, ...], Callable[[], None] | None] = {}

    def __call__(
        self,
        residual: Array,
        gradient: Gradient,
        momentum: Momentum | None = None,
        weight: float = 1.0,
        into: Array | None = None,
        threshold: float = 0.0,
    ) -> tuple[SparseVector, float]:
        """Accumulate and select as `accumulate_and_select`."""
        held = self.launch(residual, gradient, momentum, weight, into, threshold)
        found = finish(
            self._machine, self._memory, residual if into is None else into, self._chosen
        )
        del held  # the kernels that read it are done
        self.threshold = found[1]
        return found

    def launch(
        self,
        residual: Array,
        gradient: Gradient,
        momentum: Momentum | None = None,
        weight: float = 1.0,
        into: Array | None = None,
        threshold: float = 0.0,
    ) -> object:
        """Launch the kernels for a good guess, and wait for nothing.

        Returns an object that must live until they are done: copies of non-contiguous gradients.
        """
        parts = gradient_parts(residual, gradient, self.k, momentum, into)
        if (residual.size, residual.dtype) != (self._chosen.length, self._chosen.values.dtype):
            raise ValueError(
                f"this Step is for {self._chosen.values.dtype} [{self._chosen.length}], got a "
                f"residual {residual.dtype} [{residual.size}]: open a Step for it"
            )
        machine = self._machine
        where, held = located(machine, parts)
        addition = Addition(where, momentum, weight, into)
        # The last call's threshold is on the device already.
        guess = FROM_DEVICE if threshold == self.threshold else max(0.0, threshold)
        request, table = prepare(self._scratch, guess, addition)

        def launches() -> None:
            launch_selection(
                machine, self._memory, residual, self.k, self._chosen, request, table, addition
            )

        touched = [residual, into, request, table]
        touched += [] if momentum is None else [momentum.velocity, momentum.into]
        # A graph keeps the addresses that it was captured with. Those of the gradients are not
        # among them: they lie in the table, which is read anew.
        key = (where.dtype, len(where.sizes), *map(self._address, touched))
        self._run(key, launches)
        return held

    def _run(self, key: tuple[object, ...], launches: Callable[[], None]) -> None:
        """Launch; on the second call with this memory capture a graph, and later replay it."""
        if key not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
            launches()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._machine.capture(launches)
        graph()

    def _address(self, array: Array | None) -> int:
        return 0 if array is None else self._machine.address(array)
