"""HookSkips: backward passes of a model that do not count, and optimizers that pass over them.

What a hook writes into gradients is what all ranks agreed to send: where one pass does not count,
its gradients are dropped, and those of no other model with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

import torch

from ..errors import check_count
from ..optim.skip_counter import SkippedSteps

_everyones: Final[WeakSet[HookSkips]] = WeakSet()


class HookSkips:
    """Of one model whose gradients a hook exchanges.

    parameters: returns those of the model.
    max_skipped_steps: how many passes in a row may not count.
    skipped: how many passes did not count; counted: whether the last one does.
    """

    def __init__(
        self, parameters: Callable[[], Collection[torch.Tensor]], max_skipped_steps: int
    ) -> None:
        check_count("max_skipped_steps", max_skipped_steps)
        self.parameters = parameters
        self.counted = True  # the last pass
        self._skipped = SkippedSteps(max_skipped_steps)
        self._dropped: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        _everyones.add(self)

    @property
    def skipped(self) -> int:
        """How many passes did not count."""
        return self._skipped.count

    def note(self, counted: bool, rank: int, step: int, where: str) -> None:
        """Note whether a pass that is over counts; warn of one that does not.

        where: what is not finite in it; "" where that is the sum.
        Raises FloatingPointError where more in a row did not count than may be.
        """
        self.counted = counted
        if counted:
            self._skipped.end_row()
        else:
            self._skipped.note(rank, step, where)

    def end_row(self) -> None:
        """Have none in a row, as a state is loaded."""
        self._skipped.end_row()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients, once, where the last pass does not count.

        Those of other models whose hooks are ours stay: what was sent for them is in them.
        """
        if self.counted or self._dropped.get(optimizer) == self.skipped:
            return
        self._dropped[optimizer] = self.skipped  # what it has later is of no such pass
        others = set[torch.Tensor]().union(*(each.parameters() for each in _everyones))
        kept = others.difference(self.parameters())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in kept:
                    parameter.grad = None
