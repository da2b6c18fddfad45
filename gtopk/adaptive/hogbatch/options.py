"""Options of hogbatch, and the check that refuses unsuitable jobs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...errors import check_choice
from ..local_steps import require_no_common_step, require_one_pass
from ..options import Job, Options
from ..sources import require_in_order
from .ledger import require_class
from .sizes import thresholds_of


@dataclass(frozen=True)
class HogbatchOptions(Options):
    """Options of modes "hogbatch" and "adaptive-hogbatch"; equal on all ranks except `own`.

    The learning rate is meant for a global batch, as in all modes. With lr_scaling="linear" each
    update gets its batch's share of it; with several nodes, the share in its node's part of that
    batch.

    device_class: of this rank; None: "cpu" or "gpu", depending on its parameters' device.
    sizes: by class, its smallest and largest batch, or one size for both. Default: from the size
        that a probe finds up to the loader's batch_size. Slow classes start with the smallest, fast
        ones with the largest; mode "hogbatch" keeps these sizes.
    alpha: the factor of one change of a batch's size.
    beta: the share of a slow class's update that counts for the balance; "measured": the share of
        its updates that no other worker can have partly overwritten.
    merge_every: samples of all nodes between two merges of their models; None: ten merges an epoch.
    nodes: the ranks of each node; None: grouped by host.
    lock_step: workers compute one at a time, in turns; exact but slow, for tests.
    ranks_may_leave: the others continue if a rank dies, and compute its unfinished samples.
    audit: keep the sum of this rank's steps, so that `audited` can show how much was lost; only on
        a single node. It takes the memory of two more models.
    """

    own: ClassVar[Collection[str]] = ("max_batch", "min_batch", "device_class")

    min_batch: int = 1
    lr_scaling: str = "linear"
    device_class: str | None = None
    sizes: Mapping[str, int | Sequence[int]] | None = None
    alpha: float = 2.0
    beta: float | Literal["measured"] = 1.0
    merge_every: int | None = None
    nodes: Sequence[Sequence[int]] | None = None
    lock_step: bool = False
    ranks_may_leave: bool = False
    audit: bool = False

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        super().check()
        check_choice("lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))
        if self.grain != 1:
            raise ValueError(f"hogbatch has batches of any size: grain must be 1, got {self.grain}")
        self._require(1, "min_batch")
        if not (isinstance(self.alpha, float | int) and 1 < self.alpha < math.inf):
            raise ValueError(f"alpha must be a number above 1, got {self.alpha!r}")
        is_share = isinstance(self.beta, float | int) and 0 < self.beta <= 1
        if self.beta != "measured" and not is_share:
            raise ValueError(f"beta must lie in 0..1, or be 'measured', got {self.beta!r}")
        if self.merge_every is not None:
            self._require(1, "merge_every")
        if self.device_class is not None:
            require_class(self.device_class)
        thresholds_of(self.sizes)


def check(job: Job[HogbatchOptions], mode: str) -> None:
    """Raise ValueError for options that workers without common steps cannot support."""
    optimizer, options = job.optimizer, job.options
    require_one_pass(optimizer, f"mode {mode!r} updates after every batch")
    require_no_common_step(optimizer, f"mode {mode!r} has no steps of all ranks")
    if options.lock_step and job.loader.num_workers:
        raise ValueError(
            "lock_step hands out one batch at a time: use a DataLoader with num_workers=0, got "
            f"{job.loader.num_workers}"
        )
    require_in_order(job.loader)
