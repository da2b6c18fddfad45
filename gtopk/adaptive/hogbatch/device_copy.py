"""DeviceCopy: a fast worker's own copy of the shared model, on its device.

    shared   ----x------------ x' = x + others' updates -------- x' + (y - x) ---->
                  \\                                              /
    own copy      x ---- forward, backward, step ---- y ---- y - x

What a step changed is added to what the model is by then. To write y over it would undo what all
others did meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .shared_model import SharedModel


class DeviceCopy:
    """Parameters and optimizer state beside the shared ones.

    tensors: the worker's own, in the order of the layout.
    """

    def __init__(
        self,
        shared: SharedModel,
        parameters: Sequence[torch.nn.Parameter],
        states: Sequence[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._shared = shared
        self.tensors: list[torch.Tensor] = []
        for parameter, state in zip(parameters, states, strict=True):
            if state:
                optimizer.state[parameter] = state
        for place in shared.layout.places:
            parameter = parameters[place.parameter]
            own = optimizer.state[parameter][place.key] if place.key else parameter.data
            self.tensors.append(own)
        self._before = [torch.empty_like(own) for own in self.tensors]

    @torch.no_grad()
    def refresh(self) -> None:
        """Become what the shared model is."""
        for own, before, shared in zip(
            self.tensors, self._before, self._shared.tensors, strict=True
        ):
            own.copy_(shared)
            before.copy_(own)  # what was read: others may have written since

    @torch.no_grad()
    def steps(self) -> list[torch.Tensor]:
        """Return what changed since `refresh`, on the host."""
        return [
            (own - before).to("cpu") for own, before in zip(self.tensors, self._before, strict=True)
        ]

    @torch.no_grad()
    def add(self, steps: Sequence[torch.Tensor]) -> None:
        """Add what changed to the shared model."""
        for shared, step in zip(self._shared.tensors, steps, strict=True):
            shared.add_(step)
