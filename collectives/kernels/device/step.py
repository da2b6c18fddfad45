"""Accumulate and select of one residual, step after step, as a CUDA graph.

    step 1            launch, launch, launch, launch       kernels are compiled, a guess is found
    step 2            the same, captured
    from then on      replay                               one launch instead of four

Everything that changes from step to step is in device memory: the weight, the momentum's factor,
the guess, the addresses of the gradients. The host waits only for the number of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...vector import Array, Gradient, Momentum, SparseVector, gradient_parts, index_dtype
from .machine import Machine, Scratch, located
from .selection import FROM_DEVICE, Addition, buffers, finish, launch_selection, prepare

# Two are in use, as a residual and its other buffer alternate; more only if gradients' dtypes vary.
MAX_GRAPHS: Final = 8


class Step:
    """Accumulates and selects, step after step, in memory of its own.

        step = Step(machine, residual.size, k, residual.dtype)
        picked, threshold = step(residual, gradient, weight=0.25, threshold=threshold)

    The next call overwrites the entries that a call returned.

    threshold: the one that the last call returned. Pass it to the next call: it is on the device
               already, so nothing is copied.
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
        """Do what `accumulate_and_select` does."""
        kept_alive = self.launch(residual, gradient, momentum, weight, into, threshold)
        found = finish(
            self._machine, self._memory, residual if into is None else into, self._chosen
        )
        del kept_alive  # the kernels that read it are done
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
        """Launch the kernels that suffice if the guess is good, without waiting for them.

        Returns an object to keep alive until they are done: copies of non-contiguous gradients.
        """
        parts = gradient_parts(residual, gradient, self.k, momentum, into)
        if (residual.size, residual.dtype) != (self._chosen.length, self._chosen.values.dtype):
            raise ValueError(
                f"this Step is for {self._chosen.values.dtype} [{self._chosen.length}], got a "
                f"residual {residual.dtype} [{residual.size}]: open a Step for it"
            )
        machine = self._machine
        locations, kept_alive = located(machine, parts)
        addition = Addition(locations, momentum, weight, into)
        # The device still has the last call's threshold.
        guess = FROM_DEVICE if threshold == self.threshold else max(0.0, threshold)
        request, table = prepare(self._scratch, guess, addition)

        def launches() -> None:
            launch_selection(
                machine, self._memory, residual, self.k, self._chosen, request, table, addition
            )

        touched = [residual, into, request, table]
        touched += [] if momentum is None else [momentum.velocity, momentum.into]
        # A graph fixes these addresses. The gradients' are in the table, which it reads anew.
        key = (locations.dtype, len(locations.sizes), *map(self._address, touched))
        self._run(key, launches)
        return kept_alive

    def _run(self, key: tuple[object, ...], launches: Callable[[], None]) -> None:
        """Launch the first time; from the second call with this key on, replay them as a graph."""
        if key not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
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
