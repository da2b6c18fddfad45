"""RoundExchange: a round's sums of gradients, through the optimizer's method, with a residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.transports import Transport

from ..arrays import view_tensor
from ..buckets import Bucket
from ..exchange import open_exchange


class RoundExchange:
    """What one rank selects from, keeps, and gets back."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any) -> None:
        self._bucket = Bucket(parameters)
        self._exchange = open_exchange(self._bucket, compression, lambda: 0.0)

    @property
    def facts(self) -> str:
        """Return what must be equal on all ranks."""
        return self._exchange.facts

    @property
    def residual(self) -> torch.Tensor | None:
        """Return a copy of what was not sent yet, [n] on the host; None where all of it is."""
        residual = getattr(self._exchange, "residual", None)
        return None if residual is None else view_tensor(residual.values).to("cpu", copy=True)

    @residual.setter
    def residual(self, values: torch.Tensor) -> None:
        residual = getattr(self._exchange, "residual", None)
        if residual is None:
            raise ValueError("this compression keeps no residual, and the state has one")
        view_tensor(residual.values).copy_(values)
        residual.holds_nothing = False

    def take(self, sums: Sequence[torch.Tensor | None]) -> bool:
        """Take a rank's sums, one for each parameter; return whether they are finite."""
        bucket = self._bucket
        for parameter, gradient in zip(bucket.parameters, sums, strict=True):
            parameter.grad = gradient
        bucket.take(1.0)
        for parameter in bucket.parameters:
            parameter.grad = None
        return bucket.all_finite()

    def reduce(self, transport: Transport, samples: int) -> list[torch.Tensor] | None:
        """Return the update: the mean over the samples of all ranks; None where it overflows."""
        bucket = self._bucket
        bucket.weight = 1.0 / samples
        with bucket.on_stream():
            exchanged = self._exchange(bucket, transport)
        return bucket.gradients if exchanged.finite else None
