"""Hooks: what backward tells of each parameter, as it tells it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch


class BackwardHooks:
    """Counts the backward passes of each parameter, and says when its gradient is complete.

    passes_per_step: how many passes add up to a gradient.
    order:           the parameters in the order in which their gradients were complete last time.
    seconds:         of the last backward pass, from its first gradient to its last.
    Parameters hold on to this weakly, as this does to the optimizer: they outlive it.
    """

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        on_complete: weakref.WeakMethod[Callable[[torch.nn.Parameter], None]] | None = None,
    ) -> None:
        self.passes_per_step = 1
        self.order: list[torch.nn.Parameter] = []
        self.seconds = 0.0
        self._names = names
        self._on_complete = on_complete
        self._passes: dict[torch.nn.Parameter, int] = {}
        self._hooked: set[torch.nn.Parameter] = set()
        self._began: float | None = None
        # Gradients on the host and on a GPU come from threads of their own.
        self._lock = threading.Lock()

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Listen to these from now on; to those already watched once only."""
        count = weakref.WeakMethod(self._count)

        def hook(parameter: torch.nn.Parameter) -> None:
            if (counted := count()) is not None:
                counted(parameter)

        for parameter in parameters:
            if parameter not in self._hooked and parameter.requires_grad:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(hook)

    def set_passes_per_step(self, passes: int) -> None:
        """Set how many passes add up to a gradient; raise ValueError for less than one."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.passes_per_step = passes

    def passes_left(self, parameter: torch.nn.Parameter) -> int:
        """Return how many backward passes a parameter's gradient still lacks."""
        return self.passes_per_step - self._passes.get(parameter, 0)

    def begin(self) -> None:
        """Count anew: what was computed belongs to no step any more."""
        self._passes.clear()
        self.order = []
        self._began = None

    def _count(self, parameter: torch.nn.Parameter) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._began is None:
                self._began = now
            self.seconds = now - self._began
            passes = self._passes[parameter] = self._passes.get(parameter, 0) + 1
            if passes > self.passes_per_step:
                raise AssertionError(
                    f"the gradient of '{self._names[parameter]}' was computed {passes} times "
                    "before a call to step(); increase backward_passes_per_step to accumulate "
                    "gradients locally"
                )
            if passes == self.passes_per_step:
                self.order.append(parameter)
                complete = None if self._on_complete is None else self._on_complete()
                if complete is not None:
                    complete(parameter)
