"""Samples: how many of them a rank's gradients come from, and the weight that follows.

The number travels in the upper bits of the step's flags, above one that tells whether there is one,
so that no message is added, and that a rank which has joined knows what the others go by.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

VOTE_BITS: Final = 35  # of the flags, below what is said here
MOST: Final = 2**27 - 1


@dataclass(frozen=True)
class Samples:
    """What this rank says of its gradients.

    count:  of the samples they come from; None: as many as every other rank's.
    summed: the gradients are of a sum over samples, not of a mean.
    Raises ValueError for a number that does not fit, TypeError for what is no whole number.
    """

    count: int | None = None
    summed: bool = False

    def __post_init__(self) -> None:
        if self.count is None:
            return
        count = whole_number("the number of samples", self.count)  # as which it travels
        if not 0 <= count <= MOST:
            raise ValueError(f"the number of samples must lie in 0..{MOST:,}, got {count:,}")
        object.__setattr__(self, "count", count)

    @property
    def signature(self) -> str:
        """Return what must be equal on all ranks."""
        if self.count is None:
            return "gradients weighted alike: no number of samples"
        return f"gradients weighted by samples, of a {'sum' if self.summed else 'mean'}"

    @property
    def flags(self) -> int:
        """Return the part of the flags that says the number."""
        return 0 if self.count is None else (self.count << 1 | 1) << VOTE_BITS

    @property
    def own_weight(self) -> int:
        """Return what this rank's gradients weigh, by its number alone: in no unit but others'."""
        if self.count is None:
            return 1
        return min(self.count, 1) if self.summed else self.count

    def weight(self, all_flags: Sequence[int]) -> float:
        """Return this rank's weight, from all ranks' flags: b/B, or 1/B where a sum was taken."""
        return self._part(1 if self.summed else self.count or 0, all_flags)

    def share(self, all_flags: Sequence[int]) -> float:
        """Return which part of all ranks' samples is this rank's, b/B."""
        return self._part(self.count or 0, all_flags)

    def _part(self, of: int, all_flags: Sequence[int]) -> float:
        total = sum(_number(flags) or 0 for flags in all_flags)
        return of / total if total and self.count else 0.0


def whole_number(name: str, value: Any) -> int:
    """Return a number, of NumPy or torch, too, as Python's own; TypeError for no whole one."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from error


def weighs(flags: int) -> bool:
    """Tell whether the gradients of a rank with these flags count for anything."""
    return _number(flags) != 0


def _number(flags: int) -> int | None:
    said = flags >> VOTE_BITS
    return said >> 1 if said & 1 else None


class Stepper(Protocol):
    """Who steps with parameters, and was told of how many samples their next gradients are."""

    samples: Samples


_steppers = WeakTensorKeyDictionary()  # weak references to them, by parameter


def note_stepper(stepper: Stepper, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have `own_weight` know who steps with these."""
    known = weakref.ref(stepper)
    for parameter in parameters:
        _steppers[parameter] = known


def own_weight(parameter: torch.nn.Parameter | None) -> int:
    """Return what the next gradient of a parameter weighs on this rank; 1 where nobody knows."""
    known = None if parameter is None else _steppers.get(parameter)
    stepper: Stepper | None = known() if known is not None else None
    return 1 if stepper is None else stepper.samples.own_weight
