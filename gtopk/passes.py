"""Passes: how often each gradient was computed since the last step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch


class Passes:
    """Counts backward passes by parameter; one more than the limit is an error.

    limit: how many add up before a step.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str], limit: int) -> None:
        self.set_limit(limit)
        self._names = names
        self._counts: dict[torch.nn.Parameter, int] = {}
        # Weakly: a parameter outlives its optimizers, and their hooks must not count on.
        count = weakref.WeakMethod(self.count)

        def hook(parameter: torch.nn.Parameter) -> None:
            if (alive := count()) is not None:
                alive(parameter)

        for parameter in names:
            parameter.register_post_accumulate_grad_hook(hook)

    def set_limit(self, passes: int) -> None:
        """Set the limit; raise ValueError where it is none."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.limit = passes

    def count(self, parameter: torch.nn.Parameter) -> None:
        """Add a pass; raise AssertionError where it is one too many."""
        passes = self._counts[parameter] = self._counts.get(parameter, 0) + 1
        if passes > self.limit:
            raise AssertionError(
                f"the gradient of '{self._names[parameter]}' was computed {passes} times before a "
                "call to step(); increase backward_passes_per_step to accumulate gradients locally"
            )

    def forget(self) -> None:
        """Begin to count anew."""
        self._counts.clear()
