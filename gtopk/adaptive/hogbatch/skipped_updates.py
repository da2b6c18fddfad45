"""Skipped updates: those of gradients that are not finite, which would spoil everybody's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from ...buckets.buckets import is_finite
from ...step.skip_counter import SkipCounter

_LOST_AFTER: Final = 3  # updates in a row; no later one mends a model that is not finite


class SkippedUpdates(SkipCounter):
    """How many there were of one worker's, and the end of too many in a row."""

    def note(
        self, rank: int, trained: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Count one, by the parameters and their gradients.

        Raises FloatingPointError where the model is what is not finite, or where more updates in a
        row were skipped than may be.
        """
        self.count += 1
        lost = [names[p] for p in trained if not all_finite([p.detach()])]
        if lost and self._in_a_row + 1 >= _LOST_AFTER:
            raise FloatingPointError(
                f"rank {rank}: the shared model is not finite any more, in {lost[0]!r}, and no "
                "update mends it: go on from a checkpoint, with a lower learning rate"
            )
        self._lengthen(
            lambda n: (
                f"rank {rank}: {n} updates in a row were skipped, the last because the gradient of "
                f"{next(names[p] for p in trained if not all_finite(own(p)))!r} is not finite"
            )
        )


def own(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return a parameter's gradient, if it has one."""
    return [] if parameter.grad is None else [parameter.grad]


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether tensors hold neither NaN nor infinity; of GPUs', all are looked at at once."""
    on_gpu = []
    for each in tensors:
        values = each.coalesce().values() if each.is_sparse else each
        if values.is_cuda:
            on_gpu.append(values.isfinite().all())
        elif not is_finite(values):
            return False
    return not on_gpu or bool(torch.stack(on_gpu).all())
