"""Bucket: the gradients of many parameters as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Bucket:
    """A flat host vector with a place for every parameter's gradient.

    flat: float64 [n] when every parameter is float64, float32 [n] otherwise.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        every_double = all(p.dtype == torch.float64 for p in self.parameters)
        self.flat: NDArray[Any] = np.zeros(
            sum(p.numel() for p in self.parameters), np.float64 if every_double else np.float32
        )
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter in self.parameters:
            part = torch.from_numpy(self.flat[start : start + parameter.numel()])
            self.views.append(part.view(parameter.shape))
            start += parameter.numel()

    def fill(self, weight: float) -> None:
        """Copy the gradients in, times `weight`; a missing gradient counts as zeros."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        if weight != 1.0:
            self.flat *= weight

    def empty(self) -> None:
        """Copy the vector out into the gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)

    def poison(self) -> None:
        """Make every gradient NaN: whoever looks at them (GradScaler) sees what `step` saw."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
