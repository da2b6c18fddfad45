"""Hooks: what backward tells of each parameter, as it tells it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, cast

import torch


class BackwardHooks:
    """Counts the backward passes of each parameter, and says when its gradient is complete.

    limit:   how many passes add up to a gradient; one more is an error.
    order:   the parameters in the order in which their gradients were complete last time.
    began:   when the first gradient was complete, by time.perf_counter: in a step's last pass.
    seconds: from then to the last gradient of that pass.
    Parameters hold on to this weakly, as this does to whom it tells: they outlive both.
    Backward calls it for each parameter, so all it looks up is by `id`: a tensor's hash is a call
    of Python code.
    """

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        limit: int = 1,
        on_complete: Callable[[torch.nn.Parameter], None] | None = None,
    ) -> None:
        """on_complete: a method, called with each parameter whose gradient is complete."""
        self.set_limit(limit)
        self.order: list[torch.nn.Parameter] = []
        self.began = self.seconds = 0.0
        self._names = names
        # In two: a WeakMethod is Python code at each call.
        method = cast(MethodType | None, on_complete)
        self._hear: Any = None if method is None else method.__func__
        self._listener = None if method is None else weakref.ref(method.__self__)
        self._passes: dict[int, int] = {}
        self._hooked: set[torch.nn.Parameter] = set()
        self._has_begun = False
        # Gradients on the host and on a GPU come from threads of their own.
        self._lock = threading.Lock()

    def set_limit(self, passes: int) -> None:
        """Set the limit; raise ValueError where it is none."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.limit = passes

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Listen to these from now on; to those already watched once only."""
        known = weakref.ref(self)

        def hook(parameter: torch.nn.Parameter) -> None:
            if (hooks := known()) is not None:
                hooks._count(parameter)

        for parameter in parameters:
            if parameter not in self._hooked and parameter.requires_grad:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(hook)

    @property
    def has_counted(self) -> bool:
        """Tell whether there was a backward pass since `forget`, of a parameter that is watched."""
        return bool(self._passes)

    def passes_left(self, parameter: torch.nn.Parameter) -> int:
        """Return how many backward passes a parameter's gradient still lacks."""
        return self.limit - self._passes.get(id(parameter), 0)

    def forget(self) -> None:
        """Count anew: what was computed belongs to no step any more."""
        self._passes.clear()
        self.order = []
        self._has_begun = False

    def _count(self, parameter: torch.nn.Parameter) -> None:
        with self._lock:
            now = time.perf_counter()
            passes = self._passes[id(parameter)] = self._passes.get(id(parameter), 0) + 1
            # Passes before the last have forwards and data loading between them.
            if passes == self.limit and not self._has_begun:
                self._has_begun, self.began = True, now
            if self._has_begun:
                self.seconds = now - self.began
            if passes > self.limit:
                raise AssertionError(
                    f"the gradient of '{self._names[parameter]}' was computed {passes} times "
                    "before a call to step(); increase backward_passes_per_step to accumulate "
                    "gradients locally, or drop them by optimizer.zero_grad(): that of a model, or "
                    "of another optimizer, is not noticed"
                )
            if passes == self.limit:
                self.order.append(parameter)
                if self._listener is not None and (listener := self._listener()) is not None:
                    self._hear(listener, parameter)
