"""Audit: how much of the workers' steps never reached the shared model.

    the model at first + every worker's steps - the model now = lost

An addition is lost where two workers read an element, both add, and the last to write wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from collectives.transports import Transport

from ...runtime.world.membership import World


class Audit:
    """Sums up one worker's steps of the parameters, to find out how much was lost.

    Rounding is a small part of the result only where parameters are float64.
    """

    def __init__(self, shared: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._shared = shared
        self._begin = [tensor.double().clone() for tensor in self._shared]
        self._steps = [torch.zeros_like(each) for each in self._begin]
        self._distance = 0.0

    @torch.no_grad()
    def apply_step(self, apply: Callable[[], None]) -> None:
        """Compute a step on a copy of the parameters, record it, and add it to them at once."""
        shared = [parameter.data for parameter in self._parameters]
        before = [tensor.clone() for tensor in shared]
        for parameter, content in zip(self._parameters, before, strict=True):
            parameter.data = content.clone()
        apply()
        steps = [p.data - content for p, content in zip(self._parameters, before, strict=True)]
        for parameter, tensor, step in zip(self._parameters, shared, steps, strict=True):
            parameter.data = tensor
            tensor.add_(step)
        for total, step in zip(self._steps, steps, strict=True):
            total.add_(step)
            self._distance += float(step.double().abs().sum())

    def lost_share(self, world: World) -> float:
        """Return the lost share of all steps, in L1; all ranks call it together."""
        steps = torch.cat([each.reshape(-1) for each in self._steps]).numpy()
        sums = np.append(steps, self._distance)

        def work(transport: Transport, all_flags: list[int]) -> None:
            transport.allreduce(sums)

        name = f"adapt.audit.{next(world.sets[0].unnamed)}"
        world.engine.submit(name, [f"{len(sums)} numbers"], work).wait()
        now = torch.cat([tensor.double().reshape(-1) for tensor in self._shared])
        begin = torch.cat([each.reshape(-1) for each in self._begin])
        missing = begin + torch.from_numpy(sums[:-1]) - now
        return float(missing.abs().sum()) / max(float(sums[-1]), 1e-300)
