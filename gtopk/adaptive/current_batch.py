"""CurrentBatch: the batch of an optimizer's next step, its weight and its learning rate factor.

hand-over   this rank's gradients are weighted by the batch's samples; the factor is set
step        the learning rates are multiplied by the factor, and restored after the step
over        all ranks weigh the same, and the factor is 1

LearningRate: sets the factor from the size of the batch.

Only the rate is changed, never the residual: an old gradient's rest is applied at today's rate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..optim.samples import Samples
from ..optim.wrapped.wrapping import StepListener
from ..runtime.world.membership import World
from .noise_scale import Noise


class CurrentBatch(StepListener):
    """The batch of an optimizer's next step; an optimizer has one CurrentBatch for all its loaders.

    The batch handed out last counts. If each loader multiplied the rates by itself, one would
    restore rates that another had multiplied.

    factor: multiplies the next step's rates; 1 again after the step if no batch is current.
    The optimizer keeps this object, which refers to the optimizer only weakly.
    """

    def __init__(self, optimizer: Any) -> None:
        self._known = weakref.ref(optimizer)
        self._adam = optimizer.step_policy.options.adam
        self.factor = 1.0
        self._rates: list[Any] | None = None  # to restore after the step
        self._batch: object = None
        self._world: World | None = None  # in which the batch was handed out
        self._step_before: object = None  # the last step when the batch was handed out
        self._left_samples: Samples | None = None  # of a batch whose loop was left before its step
        optimizer.register_step_pre_hook(weak_hook(self._multiply))
        optimizer.register_step_post_hook(weak_hook(self._put_back))

    @property
    def _optimizer(self) -> Any:
        return self._known()

    @property
    def factor(self) -> float:
        """Return the factor of the next step's rates."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        if self._adam is not None:  # computes Adam's steps before the optimizer applies them
            self._adam.factor = factor

    @classmethod
    def of(cls, optimizer: Any) -> CurrentBatch:
        """Return the optimizer's CurrentBatch; make it where there is none."""
        known = optimizer.step_policy.listener()
        if not isinstance(known, cls):
            known = cls(optimizer)
            optimizer.step_policy.listen(known)
        return known

    def make_current(self, batch: object, samples: int, loss_reduction: Any, here: World) -> None:
        """Make a batch the current one, with this number of samples on this rank; 0: no weight."""
        self._restore_rates()  # a step that has failed called no hook behind it
        self._batch, self._left_samples, self._world = batch, None, here
        # Each step, also a skipped one, makes a report of its own: another object means a step
        # since.
        self._step_before = self._optimizer.last_step
        self._optimizer.step_policy.set_weightless(samples == 0)
        self._optimizer.set_num_samples(samples, loss_reduction)

    def finish(self, batch: object) -> None:
        """Finish a batch, unless another one is current."""
        if batch is not self._batch:
            return
        said, self._batch, self._left_samples = self._left_samples, None, None
        self.factor = 1.0
        self._optimizer.step_policy.set_weightless(False)
        # Else the script has set another number since, for a step of its own.
        if said is None or said is self._optimizer.step_policy.samples():
            self._optimizer.set_num_samples(None)

    def leave(self, batch: object) -> None:
        """Finish a batch whose loop was left, once its step has been taken.

        Sample counts that the script sets from now on belong to its own steps. Nothing is done
        where the optimizer has been collected.
        """
        if batch is not self._batch or self._optimizer is None:
            return
        if self._optimizer.last_step is not self._step_before:
            self.finish(batch)
        else:
            self._optimizer.step_policy.set_weightless(False)
            self._left_samples = self._optimizer.step_policy.samples()

    def enter(self, here: World) -> None:
        """Finish a batch that was left in an earlier world: its step failed, or never came."""
        if self._left_samples is not None and self._world is not here:
            self.finish(self._batch)

    def end_step(self) -> None:
        """Finish a batch whose loop was left before this step."""
        if self._left_samples is not None:
            self.finish(self._batch)
        elif self._batch is None:
            self.factor = 1.0

    def drop(self) -> None:
        """Finish a batch whose loop was left, and whose gradients a GradScaler did not apply."""
        if self._left_samples is not None and self._optimizer.last_step is not self._step_before:
            self.finish(self._batch)

    def _multiply(self, optimizer: Any, *step: Any) -> None:
        # The plain optimizer and its other wrappers share these hooks. A step that calls its base
        # class's step comes here twice.
        if optimizer is not self._optimizer or self.factor == 1.0 or self._rates is not None:
            return
        self._rates = []
        for group in optimizer.param_groups:
            rate, multiplied = group["lr"], group["lr"] * self.factor
            self._rates.append((group, rate, multiplied))
            group["lr"] = multiplied

    def _put_back(self, optimizer: Any, *step: Any) -> None:
        if optimizer is self._optimizer:
            self._restore_rates()

    def _restore_rates(self) -> None:
        """Undo the multiplication, but of rates that were set since, by a schedule or a state."""
        for group, rate, multiplied in self._rates or ():
            # By identity: a schedule may have set an equal number, which is to stay.
            if group["lr"] is multiplied:
                group["lr"] = rate
        self._rates = None


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a bound method as long as its object lives.

    A distributed optimizer shares its hooks with the plain one, which outlives it. A hook whose
    object is gone stays registered: the object may go while a step iterates over its hooks.
    """
    known = weakref.WeakMethod(method)

    def hook(*step: Any) -> None:
        if (call := known()) is not None:
            call(*step)

    return hook


Factor = Callable[[float, Noise | None, float], float]


def adascale(s: float, noise: Noise | None, reference: float) -> float:
    """Return AdaScale's gain (V + M) / (V/s + M), between 1 and s; 1 where both are 0 or unknown.

    V is the variance of the reference batch's gradient, M the square of its mean. Johnson et al.
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
    """Scales an optimizer's learning rates with the samples of its batches.

    reference: the samples of a step for which the rates were chosen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: str, reference: float) -> None:
        self._factor = FACTORS[scaling]
        self._reference = reference
        self._current_batch = CurrentBatch.of(optimizer)

    def scale(self, samples: int, noise: Noise | None) -> None:
        """Set the factor for a batch of this many samples over all ranks."""
        self._current_batch.factor = self._factor(samples / self._reference, noise, self._reference)
