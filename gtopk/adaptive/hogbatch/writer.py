"""Writer: how a worker's steps reach the shared model.

slow classes    its parameters are the shared ones
fast classes    they are its own copy, and the shared ones for a step

So every step is one in place, of the model and the optimizer's state as they are by then, whatever
the optimizer makes of both; what is old in it is the gradient.

Audit: how much of the workers' steps never reached the shared model.

    where it began + every worker's steps - where it is = lost

The race: two workers read an element, both add, and the one that writes last wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from collectives.transports import Transport

from ...runtime.world.state import World
from .board import Board
from .device_copy import DeviceCopy
from .shared_model import SharedModel, require_in_place


class Audit:
    """One worker's account, of the parameters.

    Rounding is the smaller part of what it finds where parameters are float64.
    """

    def __init__(self, shared: SharedModel, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._shared = shared.parameters
        self._begin = [tensor.double().clone() for tensor in self._shared]
        self._steps = [torch.zeros_like(each) for each in self._begin]
        self._distance = 0.0

    @torch.no_grad()
    def in_place(self, apply: Callable[[], None]) -> None:
        """Take in what a step in place changes: computed on a copy, and added at once."""
        shared = [parameter.data for parameter in self._parameters]
        before = [tensor.clone() for tensor in shared]
        for parameter, copy in zip(self._parameters, before, strict=True):
            parameter.data = copy.clone()
        apply()
        steps = [p.data - copy for p, copy in zip(self._parameters, before, strict=True)]
        for parameter, tensor, step in zip(self._parameters, shared, steps, strict=True):
            parameter.data = tensor
            tensor.add_(step)
        for total, step in zip(self._steps, steps, strict=True):
            total.add_(step)
            self._distance += float(step.double().abs().sum())

    def lost(self, world: World) -> float:
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


class Writer:
    """One worker's; its board counts the updates, and how stale they were.

    last_staleness: others' updates between the last hand-over and the update that followed.
    """

    def __init__(
        self,
        shared: SharedModel,
        board: Board,
        trained: Sequence[torch.nn.Parameter],
        states: Sequence[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
        *,
        copies: bool,
        audits: bool,
    ) -> None:
        """Let the optimizer's state be shared, and the parameters, or `copies` of what is."""
        self._shared, self._board = shared, board
        self._trained, self._optimizer = trained, optimizer
        shared.map_state(trained, states, optimizer)
        self._copy = DeviceCopy(shared, trained) if copies else None
        if self._copy is None:
            shared.map_parameters(trained)
        self._audit = Audit(shared, trained) if audits else None
        self._seen = 0  # updates of the model, at the last hand-over
        self.last_staleness = 0

    def check(self) -> None:
        """Raise RuntimeError where the script has put other tensors into parameters or state."""
        tensors = self._copy.tensors if self._copy is not None else self._shared.tensors
        require_in_place(self._shared.layout, tensors, self._trained, self._optimizer)

    def hand_over(self) -> None:
        """Have the parameters be what the model is now, for the batch that comes."""
        self.refresh()
        self._seen = self._board.total("updates")

    def refresh(self) -> None:
        """Have the parameters be what the model is now."""
        if self._copy is not None:
            self._copy.refresh()

    def update(self, apply: Callable[[], None]) -> None:
        """Update the model by a step, which `apply` makes of the shared parameters."""
        board = self._board
        with self._copy.lent() if self._copy is not None else nullcontext(), board.writing():
            if self._audit is not None:
                self._audit.in_place(apply)
            else:
                apply()
        self.last_staleness = board.total("updates") - self._seen
        board.add("staleness", self.last_staleness)
        board["stalest"] = max(board["stalest"], self.last_staleness)
        board.add("updates", 1)

    def audited(self, world: World) -> float:
        """Return the share of all steps, in L1, that was lost; raise ValueError without an audit.

        All workers call it.
        """
        if self._audit is None:
            raise ValueError("nothing was audited: make the loader by adapt(..., audit=True)")
        return self._audit.lost(world)
