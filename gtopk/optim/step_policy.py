"""StepPolicy: what a mode of `hvd.adapt` may ask of a distributed optimizer, and have it do.

The modes hand out batches, and some of them step in the optimizer's place. All that they need of it
besides its public methods is here, so that the optimizer may change behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..exchange.exchange import Progress
from ..runtime.world.state import World
from .options import Options
from .replica_check import ReplicaCheck
from .samples import Samples
from .skip_counter import SkippedSteps


class StepListener:
    """Hears of an optimizer's steps, and does nothing with it; a subclass does."""

    def enter(self, here: World) -> None:
        """The next step is the first one in another world."""

    def end_step(self) -> None:
        """A step has been taken, or skipped on all ranks."""

    def drop(self) -> None:
        """Gradients are cleared; those that were synchronized are not stepped with any more."""


class StepPolicy:
    """Made anew by `optimizer.step_policy` each time.

    names:    of the optimizer's parameters, as all ranks agree on them.
    options:  what the script has asked of DistributedOptimizer, its compression among it.
    name:     of its exchanges, equal on all ranks.
    progress: of its exchanges; a mode that steps in its place counts there, too.
    replicas: the check whether replicas are apart.
    skipped:  how many steps were skipped.
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
        """Return of how many samples the gradients in hand are, as was said last."""
        said: Samples = self._optimizer._reducer.samples
        return said

    def stand_in(self, stands_in: bool) -> None:
        """Have the gradients in hand weigh nothing: their batch is no rank's own."""
        self._optimizer._stands_in = stands_in

    def listener(self) -> StepListener:
        """Return who hears of the steps."""
        listener: StepListener = self._optimizer._listener
        return listener

    def listen(self, listener: StepListener) -> None:
        """Have this one hear of the steps, in place of the one before."""
        self._optimizer._listener = listener

    def clip(self) -> None:
        """Shorten the gradients, which are an agreed update, to global_clip_norm."""
        self._optimizer._clip(1.0)

    def tell_of_compression(self) -> None:
        """Have rank 0 say, once, what the compression may cost where the mode steps."""
        self._optimizer._tell_of_compression(by_mode=True)

    def step_for(self, mode: str) -> None:
        """Have the optimizer exchange no gradients any more: `mode` steps in its place."""
        self._optimizer._reducer.stand_aside(mode)

    def mode(self) -> str:
        """Return the mode that steps in the optimizer's place; "": it steps itself."""
        mode: str = self._optimizer._reducer.aside_for
        return mode

    def note_step(self) -> None:
        """Let learning-rate schedulers know that a step was taken."""
        self._optimizer._opt_called = self._optimizer._wrapped._opt_called = True
