"""InHand: the batch that an optimizer's next step is of, and what that step has of it.

hand-over   this rank's gradients weigh the batch's samples, the rates have its factor
step        the rates are multiplied, and put back
over        every rank weighs alike, at the rates as they are
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...step.samples import Samples


class InHand:
    """What is in hand of an optimizer; one, whichever loaders it has.

    The batch handed out last counts. If each loader multiplied the rates by itself, one would put
    back what another had multiplied.

    factor: of the next step's rates.
    The optimizer keeps this, and nothing here keeps the optimizer: it goes with its last user.
    """

    def __init__(self, optimizer: Any) -> None:
        self._known = weakref.ref(optimizer)
        self.factor = 1.0
        self._rates: list[Any] | None = None  # to be put back
        self._batch: object = None
        self._step_before: object = None  # when the batch was handed out
        self._said: Samples | None = None  # of a batch whose loop was left before its step
        optimizer.register_step_pre_hook(weakly(self._multiply))
        optimizer.register_step_post_hook(weakly(self._close_step))

    @property
    def _optimizer(self) -> Any:
        return self._known()

    @classmethod
    def of(cls, optimizer: Any) -> InHand:
        """Return the optimizer's, made where there is none."""
        known: dict[str, InHand] = vars(optimizer)
        return known.get("_in_hand") or known.setdefault("_in_hand", cls(optimizer))

    def take(self, batch: object, samples: int, loss_reduction: Any) -> None:
        """Have a batch in hand, of so many of this rank's samples; none: it stands in."""
        self._batch, self._said = batch, None
        self._step_before = self._optimizer.last_step
        self._optimizer._stands_in = samples == 0
        self._optimizer.set_num_samples(samples, loss_reduction)

    def let_go(self, batch: object) -> None:
        """Be done with a batch, unless another is in hand."""
        if batch is not self._batch:
            return
        said, self._batch, self._said = self._said, None, None
        self.factor = 1.0
        self._optimizer._stands_in = False
        if said is None or said is self._optimizer._reducer.samples:  # the script has said no other
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
            self._optimizer._stands_in = False
            self._said = self._optimizer._reducer.samples

    def _multiply(self, optimizer: Any, *step: Any) -> None:
        # A step that calls that of its base class comes here twice.
        if self.factor == 1.0 or self._rates is not None:
            return
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _close_step(self, optimizer: Any, *step: Any) -> None:
        if self._rates is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._rates = None
        if self._said is not None:
            self.let_go(self._batch)


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
