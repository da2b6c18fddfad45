"""HookSkips: counts backward passes of a model that do not count, and drops their gradients.

Only this model's gradients are dropped: an optimizer may step several models, and agreed gradients
of the others were sent for good.
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
    """Notes whether passes count, for one model whose gradients a hook exchanges.

    parameters: returns the model's parameters.
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
        """Note whether a pass that has ended counts; warn of one that does not.

        where: the ranks whose gradients are not finite; "": only the sum is not.
        Raises FloatingPointError where more passes in a row did not count than allowed.
        """
        self.counted = counted
        if counted:
            self._skipped.end_row()
        else:
            self._skipped.note(rank, step, where)

    def end_row(self) -> None:
        """Begin a new row: a state was loaded."""
        self._skipped.end_row()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients, once, where the last pass does not count.

        Gradients of other models with a hook of gtopk stay: they hold what was sent for them.
        """
        if self.counted or self._dropped.get(optimizer) == self.skipped:
            return
        self._dropped[optimizer] = self.skipped  # later gradients are of another pass
        others = set[torch.Tensor]().union(*(each.parameters() for each in _everyones))
        kept = others.difference(self.parameters())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in kept:
                    parameter.grad = None
