"""CurrentBatch: the batch that an optimizer's next step is of, and what that step has of it.

hand-over   this rank's gradients weigh the batch's samples, the rates have its factor
step        the rates are multiplied, and put back
over        every rank weighs alike, at the rates as they are

LearningRate: how a step grows with its batch.

The rate is changed, never the residual: what was kept of an old gradient is applied at today's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..optim.samples import Samples
from ..optim.step_policy import StepListener
from ..runtime.world.state import World
from .noise_scale import Noise


class CurrentBatch(StepListener):
    """The batch of an optimizer's next step; an optimizer has one CurrentBatch for all its loaders.

    The batch handed out last counts. If each loader multiplied the rates by itself, one would put
    back what another had multiplied.

    factor: of the next step's rates; without a batch in hand 1 again after it.
    The optimizer keeps this, and nothing here keeps the optimizer: it goes with its last user.
    """

    def __init__(self, optimizer: Any) -> None:
        self._known = weakref.ref(optimizer)
        options = getattr(optimizer, "_options", None)  # none where it is a plain one
        self._adam = options and options.adam
        self.factor = 1.0
        self._rates: list[Any] | None = None  # to be put back
        self._batch: object = None
        self._world: World | None = None  # that the batch is of
        self._step_before: object = None  # when the batch was handed out
        self._said: Samples | None = None  # of a batch whose loop was left before its step
        optimizer.register_step_pre_hook(weakly(self._multiply))
        optimizer.register_step_post_hook(weakly(self._put_back))

    @property
    def _optimizer(self) -> Any:
        return self._known()

    @property
    def factor(self) -> float:
        """Return what the next step's rates are multiplied with."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        if self._adam is not None:  # its steps are made before the optimizer steps with them
            self._adam.factor = factor

    @classmethod
    def of(cls, optimizer: Any) -> CurrentBatch:
        """Return the optimizer's, made where there is none."""
        known = optimizer.step_policy.listener()
        if not isinstance(known, cls):
            known = cls(optimizer)
            optimizer.step_policy.listen(known)
        return known

    def take(self, batch: object, samples: int, loss_reduction: Any, here: World) -> None:
        """Have a batch in hand, of so many of this rank's samples; none: it stands in."""
        self._batch, self._said, self._world = batch, None, here
        self._step_before = self._optimizer.last_step
        self._optimizer.step_policy.stand_in(samples == 0)
        self._optimizer.set_num_samples(samples, loss_reduction)

    def let_go(self, batch: object) -> None:
        """Be done with a batch, unless another is in hand."""
        if batch is not self._batch:
            return
        said, self._batch, self._said = self._said, None, None
        self.factor = 1.0
        self._optimizer.step_policy.stand_in(False)
        if (
            said is None or said is self._optimizer.step_policy.samples()
        ):  # the script has said no other
            self._optimizer.set_num_samples(None)

    def leave(self, batch: object) -> None:
        """Be done with a batch whose loop was left, once its step has been taken.

        What the script says of its samples from now on is of its own steps. An optimizer that is
        gone, as where both are garbage, has nothing to be done.
        """
        if batch is not self._batch or self._optimizer is None:
            return
        if self._optimizer.last_step is not self._step_before:
            self.let_go(batch)
        else:
            self._optimizer.step_policy.stand_in(False)
            self._said = self._optimizer.step_policy.samples()

    def enter(self, here: World) -> None:
        """Be done with a batch that was left in a world before: its step failed, or was none."""
        if self._said is not None and self._world is not here:
            self.let_go(self._batch)

    def end_step(self) -> None:
        """Be done with a batch that was left before this step."""
        if self._said is not None:
            self.let_go(self._batch)
        elif self._batch is None:
            self.factor = 1.0

    def drop(self) -> None:
        """Be done with a batch that was left, and whose gradients a GradScaler would not apply."""
        if self._said is not None and self._optimizer.last_step is not self._step_before:
            self.let_go(self._batch)

    def _multiply(self, optimizer: Any, *step: Any) -> None:
        # The plain optimizer has the same hooks, and so has whatever else wraps it. A step that
        # calls that of its base class comes here twice.
        if optimizer is not self._optimizer or self.factor == 1.0 or self._rates is not None:
            return
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _put_back(self, optimizer: Any, *step: Any) -> None:
        if optimizer is not self._optimizer or self._rates is None:
            return
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._rates = None


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a bound method as long as its object is there.

    A distributed optimizer shares its hooks with the plain one, which outlives it. What calls
    nothing any more stays there: the object may go while a step walks through its hooks.
    """
    known = weakref.WeakMethod(method)

    def hook(*step: Any) -> None:
        if (call := known()) is not None:
            call(*step)

    return hook


Factor = Callable[[float, Noise | None, float], float]


def adascale(s: float, noise: Noise | None, reference: float) -> float:
    """Return AdaScale's gain (V + M) / (V/s + M), between 1 and s; 1 where both are 0 or unknown.

    V, the variance of the reference batch's gradient, and M, its mean's square. Johnson et al.
    2020, arXiv 2007.05105, section 3.
    """
    if noise is None or noise.variance == noise.square == 0.0:
        return 1.0
    variance, square = noise.variance / reference, noise.square
    return (variance + square) / (variance / s + square)


FACTORS: Final[Mapping[str, Factor]] = {
    "none": lambda s, noise, reference: 1.0,
    "linear": lambda s, noise, reference: s,
    "sqrt": lambda s, noise, reference: math.sqrt(s),
    "adascale": adascale,
}


class LearningRate:
    """Has an optimizer's rates follow the samples of its batches.

    reference: the samples that the rates are meant for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: str, reference: float) -> None:
        self._factor = FACTORS[scaling]
        self._reference = reference
        self._current_batch = CurrentBatch.of(optimizer)

    def scale(self, samples: int, noise: Noise | None) -> None:
        """Set the factor for a batch of so many samples over all ranks."""
        self._current_batch.factor = self._factor(samples / self._reference, noise, self._reference)
