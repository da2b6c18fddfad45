"""Samples: how many of them a rank's gradients come from, and the weight that follows.

The number travels in the upper bits of the step's flags, above one that tells whether there is one,
so that no message is added, and that a rank which has joined knows what the others go by.

Weights: what a rank's gradients are multiplied with before anything else.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from collectives.kernels import squared_norm, squared_norms

from ..exchange.buckets.arrays import current_stream, home_of, located, view_array

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


class LocalClip:
    """Shortens a rank's part of a sum to the norm allowed; knows the part's own norm.

    gradients: of this rank; scale: what they are multiplied with, and norms are meant without.
    allowed_norm: of the sum, were the ranks' gradients independent.
    allowed_mean: of the mean gradient, whose squares are `ratio` of those of this rank's.
    """

    def __init__(
        self,
        gradients: Iterable[torch.Tensor | None],
        allowed_norm: float | None,
        scale: float = 1.0,
        allowed_mean: float | None = None,
        ratio: float = 1.0,
    ) -> None:
        self._allowed_norm, self._norm = allowed_norm, 0.0
        self._allowed_mean, self._ratio = allowed_mean, ratio
        if allowed_norm is not None or allowed_mean is not None:
            self._norm = norm_of([each for each in gradients if each is not None]) / scale

    def factor(self, weight: float, share: float) -> float:
        """Return what shortens weight * gradients to the lesser of the norms that are allowed.

        share: of this rank in the sum; all ranks' add up to 1. Independent gradients of sqrt(share)
        of the norm allowed have that as a sum: with 1/ranks each, Lin et al. 2018, section 3.2.
        What is not finite is not shortened: the step is skipped.
        """
        norm = weight * self._norm
        if not 0.0 < norm < math.inf:
            return 1.0
        allowed = math.inf
        if self._allowed_norm is not None:
            allowed = self._allowed_norm * math.sqrt(share)
        if self._allowed_mean is not None:
            allowed = min(allowed, self._allowed_mean * share / math.sqrt(self._ratio))
        return min(1.0, allowed / norm)


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all their values, of whatever dtypes, coalesced where sparse.

    Not finite where a value is not. 16-bit values are added in float32, and what overflows there in
    float64, which takes a CPU thirty times as long.
    """
    parts = [t.detach().coalesce()._values() if t.is_sparse else t.detach() for t in tensors]

    def norm(least: torch.dtype) -> float:
        wide = [torch.promote_types(part.dtype, least) for part in parts]
        norms: dict[torch.device, list[torch.Tensor]] = {}
        for part, dtype in zip(parts, wide, strict=True):
            one = torch.linalg.vector_norm(part, dtype=dtype).double()
            norms.setdefault(part.device, []).append(one)
        # One wait for each device.
        return math.hypot(*(float(torch.stack(each).norm()) for each in norms.values()))

    found = norm(torch.float32)
    return norm(torch.float64) if found == math.inf else found


def shorten(gradients: Sequence[torch.Tensor], allowed: float, scale: float) -> float:
    """Shorten what is the same on all ranks to this norm, in place; return what it was.

    scale: of the loss, by which gradients are longer than either norm.
    """
    norm = agreed_norm(gradients) / scale
    if norm > allowed:
        torch._foreach_mul_([g._values() if g.is_sparse else g for g in gradients], allowed / norm)
    return norm


def agreed_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the norm of what is the same on all ranks: it is then, to the bit, the same on each.

    The kernels add in float64 and in one order, on any processor and any GPU; torch's sums go by
    its instructions, and two ranks' norms may differ in the last bit.
    """
    home = home_of(tensors)
    with current_stream(home)():
        flat = []
        for tensor in tensors:
            part = tensor.detach().coalesce()._values() if tensor.is_sparse else tensor.detach()
            if home.type == "cpu":
                part = part.to(home, torch.promote_types(part.dtype, torch.float32))
            flat.append(part.reshape(-1).contiguous())
        if home.type == "cpu":
            squares = [squared_norm(view_array(part)) if part.numel() else 0.0 for part in flat]
        else:
            squares = _squares_on_gpu(flat)
    return math.sqrt(sum(squares))


def _squares_on_gpu(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return each tensor's sum of squares; one launch and one wait for those of one dtype."""
    squares = [0.0] * len(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for at, square in zip(
            places, squared_norms(located([tensors[at] for at in places])), strict=True
        ):
            squares[at] = square
    return squares
