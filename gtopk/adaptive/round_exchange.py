"""RoundExchange: a round's sums of gradients, through the optimizer's method, with a residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.transports import Transport

from ..arrays import view_tensor
from ..buckets import Bucket
from ..exchange import Progress
from ..exchanges import open_exchange


class RoundExchange:
    """What one rank selects from, keeps, and gets back."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any) -> None:
        self._bucket = Bucket(parameters)
        self._progress = Progress()
        self._exchange = open_exchange(self._bucket, compression, self._progress)

    @property
    def facts(self) -> str:
        """Return what must be equal on all ranks."""
        return self._exchange.facts

    @property
    def residual(self) -> torch.Tensor | None:
        """Return a copy of what was not sent yet, [n] on the host; None where all of it is."""
        residual = self._exchange.residual
        return None if residual is None else view_tensor(residual.values).to("cpu", copy=True)

    @residual.setter
    def residual(self, values: torch.Tensor) -> None:
        residual = self._exchange.residual
        if residual is None:
            raise ValueError(
                "this compression keeps no residual, and the state has one, which would be lost; "
                "load it with the compression it was saved with"
            )
        view_tensor(residual.values).copy_(values)
        residual.holds_nothing = False

    @property
    def unsent(self) -> list[torch.Tensor] | None:
        """Return the residual's own memory, by parameter; None where nothing is left in it."""
        residual = self._exchange.residual
        if residual is None or residual.holds_nothing:
            return None
        return self._bucket.split(view_tensor(residual.values))

    def forget(self) -> None:
        """Keep nothing of what was not sent: it is somebody else's now."""
        if self._exchange.residual is not None:
            self._exchange.residual.clear()

    def take(self, sums: Sequence[torch.Tensor | None]) -> bool:
        """Take a rank's sums, one for each parameter; return whether they are finite."""
        bucket = self._bucket
        for parameter, gradient in zip(bucket.parameters, sums, strict=True):
            parameter.grad = gradient
        bucket.take(1.0)
        for parameter in bucket.parameters:
            parameter.grad = None
        return bucket.all_finite()

    def reduce(self, transport: Transport, weight: float) -> list[torch.Tensor] | None:
        """Return the update: the sum of weight * sums of all ranks; None where it overflows."""
        bucket = self._bucket
        bucket.weight = weight
        with bucket.on_stream():
            if not self._exchange(bucket, transport).finite:
                return None
            self._exchange.apply(bucket)
        self._progress.steps += 1
        return bucket.gradients
