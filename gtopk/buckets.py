"""Bucket: the gradients of many parameters as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Bucket:
    """A flat host vector with a place for every parameter's gradient.

    flat: float64 [n] when a parameter is float64, float32 [n] otherwise.
    Raises ValueError for complex parameters, and when there is no element at all.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        if any(p.is_complex() for p in self.parameters):
            raise ValueError("complex parameters cannot be exchanged; keep real and imaginary part")
        length = sum(p.numel() for p in self.parameters)
        if length == 0:
            raise ValueError("there is nothing to train: no parameter requires a gradient")
        any_double = any(p.dtype == torch.float64 for p in self.parameters)
        self.flat: NDArray[Any] = np.zeros(length, np.float64 if any_double else np.float32)
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

    def empty(self, may_stay_none: bool) -> None:
        """Copy the vector out into the gradients.

        may_stay_none: a missing gradient is missing on every rank, and stays so where the update
            is zero: the optimizer passes over it, as it does without gtopk.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                if may_stay_none and not bool(view.any()):
                    continue
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)

    def poison(self) -> None:
        """Make every gradient NaN: whoever looks at them (GradScaler) sees what `step` saw."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
