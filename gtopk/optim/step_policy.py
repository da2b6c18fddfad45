"""StepPolicy: the interface by which the modes of `hvd.adapt` drive a distributed optimizer.

The modes hand out batches, and some of them step in the optimizer's place. All that they need of
the optimizer besides its public methods is here, so that its inner parts may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..exchange.exchange import Progress
from ..runtime.world.membership import World
from .options import Options
from .replica_check import ReplicaCheck
from .samples import Samples
from .skip_counter import SkippedSteps


class StepListener:
    """Is told of an optimizer's steps. This one does nothing; subclasses do."""

    def enter(self, here: World) -> None:
        """The next step is the first one in another world."""

    def end_step(self) -> None:
        """A step has been taken, or skipped on all ranks."""

    def drop(self) -> None:
        """Gradients are cleared; no step will use those that were synchronized."""


class StepPolicy:
    """The optimizer's inside, for a mode; `optimizer.step_policy` makes a new one each time.

    names:    of the optimizer's parameters, equal on all ranks.
    options:  the arguments of DistributedOptimizer, with its compression.
    name:     begins the names of the optimizer's exchanges; equal on all ranks.
    progress: of these exchanges; a mode that steps in the optimizer's place counts there, too.
    replicas: the check whether replicas differ.
    skipped:  counts skipped steps.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.names: Mapping[torch.nn.Parameter, str] = optimizer._parameter_names
        self.options: Options = optimizer._options
        self.name: str = optimizer._reducer.peers.name
        self.progress: Progress = optimizer._reducer.progress
        self.replicas: ReplicaCheck = optimizer._replicas
        self.skipped: SkippedSteps = optimizer._skipped

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that require a gradient now."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    def samples(self) -> Samples:
        """Return the number of samples behind the current gradients, as it was set last."""
        said: Samples = self._optimizer._reducer.samples
        return said

    def set_weightless(self, is_weightless: bool) -> None:
        """Say whether the current batch is a stand-in, whose gradients weigh nothing."""
        self._optimizer._is_weightless = is_weightless

    def listener(self) -> StepListener:
        """Return the listener that is told of the steps."""
        listener: StepListener = self._optimizer._listener
        return listener

    def listen(self, listener: StepListener) -> None:
        """Tell this listener of the steps, in place of the one before."""
        self._optimizer._listener = listener

    def clip(self) -> None:
        """Shorten the gradients, which are an agreed update, to global_clip_norm."""
        self._optimizer._clip(1.0)

    def log_compression(self) -> None:
        """Warn, once and on rank 0, where the compression may cost accuracy in this mode."""
        self._optimizer._log_compression(by_mode=True)

    def stop_exchanging(self, mode: str) -> None:
        """Stop the optimizer's exchanges: `mode` steps in its place from now on."""
        self._optimizer._reducer.stop_exchanging(mode)

    def mode(self) -> str:
        """Return the mode that steps in the optimizer's place; "": it steps itself."""
        mode: str = self._optimizer._reducer.stepping_mode
        return mode

    def note_step(self) -> None:
        """Let learning-rate schedulers know that a step was taken."""
        # torch's schedulers read this mark, to warn where they come before the optimizer.
        self._optimizer._opt_called = self._optimizer._wrapped._opt_called = True
