"""Readings: properties of a distributed optimizer for scripts, some by Horovod's private names."""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.world.process_sets import ProcessSet
from ..options import Options
from ..reducer import Reducer
from ..replica_check import ReplicaCheck
from ..skip_counter import SkippedSteps
from ..step_policy import StepPolicy
from .wrapping import Wrapping


class Readings(Wrapping):
    """Read-only properties of a distributed optimizer: a mixin, which changes nothing (`wrap`)."""

    _options: Options
    _reducer: Reducer
    _replicas: ReplicaCheck
    _skipped: SkippedSteps

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce together."""
        return self._options.process_set

    @property
    def op(self) -> int:
        """Average or Sum."""
        return self._options.op

    @property
    def gradient_predivide_factor(self) -> float:
        """The factor that divides gradients before the sum, and multiplies them after it."""
        return self._options.gradient_predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are exchanged as dense ones."""
        return self._options.sparse_as_dense

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add up before a step."""
        return self._reducer.hooks.limit

    @property
    def straggler_scores(self) -> list[float | None] | None:
        """The speed of each rank's computing, of the last report; the fastest is 1. None before.

        Of the last steps: the least of all ranks' median seconds, over the rank's own.
        """
        return self._reducer.stragglers.scores

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped, on all ranks, as a gradient or a sum was not finite."""
        return self._skipped.count

    @property
    def divergences(self) -> int:
        """How many checks found that replicas differ, and did not end in an error."""
        return self._replicas.divergences

    @property
    def step_policy(self) -> StepPolicy:
        """The interface that the modes of `hvd.adapt` drive this optimizer by."""
        return StepPolicy(self)

    @property
    def _compression(self) -> Any:
        return self._options.compression

    @property
    def _handles(self) -> dict[torch.nn.Parameter, Any]:
        return self._reducer.in_flight()

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        return set(self._reducer.trained())

    @property
    def _allreduce_delay(self) -> dict[torch.nn.Parameter, int]:
        return {p: self._reducer.hooks.passes_left(p) for p in self._reducer.trained()}
