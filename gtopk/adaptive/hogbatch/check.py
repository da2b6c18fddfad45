"""What hogbatch refuses, and what it warns of."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..batches.sources import require_in_order
from ..local_training.stepping import require_no_common_step
from ..options import Job
from .options import HogbatchOptions

_log = logging.getLogger("gtopk")


def check(job: Job[HogbatchOptions], mode: str) -> None:
    """Raise ValueError for what workers without steps in common cannot do."""
    optimizer, options = job.optimizer, job.options
    if optimizer.backward_passes_per_step != 1:
        raise ValueError(
            f"mode {mode!r} updates after every batch: use backward_passes_per_step=1, got "
            f"{optimizer.backward_passes_per_step}"
        )
    require_no_common_step(optimizer, f"mode {mode!r} has no steps of all ranks")
    if options.lock_step and job.loader.num_workers:
        raise ValueError(
            "lock_step hands out one batch at a time: use a DataLoader with num_workers=0, got "
            f"{job.loader.num_workers}"
        )
    require_in_order(job.loader)


def warn_of_few_cores(workers: int, cores: int, ranks: Sequence[int]) -> None:
    """Warn where a node's workers on CPUs are more than its cores."""
    if workers > cores:
        _log.warning(
            "%d workers of hogbatch on CPUs share %d core%s (ranks %s): they take turns on them, "
            "which makes updates older and none faster; start %d of them",
            workers,
            cores,
            "s" * (cores > 1),
            ", ".join(map(str, ranks)),
            cores,
        )
