"""Samples: the number of samples behind a rank's gradients, and the resulting weight.

The number is sent in the upper bits of the step's flags, above a bit that says whether there is a
number. So it needs no extra message, and joined ranks know the other ranks' numbers, too. A rank's
gradients are multiplied with its weight before anything else.
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

from ..exchange.buckets.arrays import current_stream, device_of, located, view_array

# Flags have 63 bits: 35 for other uses, one that says whether there is a number, 27 for the number.
FLAG_BITS_BELOW_SAMPLES: Final = 35
MOST: Final = 2**27 - 1


@dataclass(frozen=True)
class Samples:
    """The number of samples behind this rank's gradients, from `set_num_samples`.

    count:  number of samples; None: all ranks have equally many.
    summed: gradients are of a sum over samples, not of a mean.
    Raises ValueError for a number out of 0..MOST, TypeError for a non-integer.
    """

    count: int | None = None
    summed: bool = False

    def __post_init__(self) -> None:
        if self.count is None:
            return
        count = whole_number("the number of samples", self.count)  # NumPy's become int
        if not 0 <= count <= MOST:
            raise ValueError(f"the number of samples must lie in 0..{MOST:,}, got {count:,}")
        object.__setattr__(self, "count", count)

    @property
    def signature(self) -> str:
        """Return the part of an operation's signature that must be equal on all ranks."""
        if self.count is None:
            return "gradients weighted alike: no number of samples"
        return f"gradients weighted by samples, of a {'sum' if self.summed else 'mean'}"

    @property
    def flags(self) -> int:
        """Return the number as bits of the flags."""
        return 0 if self.count is None else (self.count << 1 | 1) << FLAG_BITS_BELOW_SAMPLES

    @property
    def own_weight(self) -> int:
        """Return this rank's unnormalized weight, from its own sample count.

        Only its ratio to the other ranks' weights is meaningful.
        """
        if self.count is None:
            return 1
        # A sum already includes its number of samples.
        return min(self.count, 1) if self.summed else self.count

    def weight(self, all_flags: Sequence[int]) -> float:
        """Return this rank's weight, from all ranks' flags: b/B, or 1/B if the loss was summed."""
        return self._part(1 if self.summed else self.count or 0, all_flags)

    def share(self, all_flags: Sequence[int]) -> float:
        """Return this rank's share of all ranks' samples, b/B."""
        return self._part(self.count or 0, all_flags)

    def _part(self, samples: int, all_flags: Sequence[int]) -> float:
        # If no rank has samples, nothing counts; avoid dividing by 0.
        total = sum(_number(flags) or 0 for flags in all_flags)
        return samples / total if total and self.count else 0.0


def whole_number(name: str, value: Any) -> int:
    """Return an integer, also one of NumPy or torch, as an int; otherwise raise TypeError."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from error


def is_weighted(flags: int) -> bool:
    """Return whether the gradients of a rank with these flags have a nonzero weight."""
    return _number(flags) != 0


def _number(flags: int) -> int | None:
    bits = flags >> FLAG_BITS_BELOW_SAMPLES
    return bits >> 1 if bits & 1 else None


class Stepper(Protocol):
    """An object that steps parameters, and knows the sample count of their next gradients.

    See `Reducer`.
    """

    samples: Samples


_steppers = WeakTensorKeyDictionary()  # by parameter, a weak reference to its stepper


def note_stepper(stepper: Stepper, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Record the object that steps these parameters, for `own_weight`."""
    stepper_ref = weakref.ref(stepper)
    for parameter in parameters:
        _steppers[parameter] = stepper_ref


def own_weight(parameter: torch.nn.Parameter | None) -> int:
    """Return the weight of a parameter's next gradient on this rank; 1 without a stepper."""
    stepper_ref = None if parameter is None else _steppers.get(parameter)
    stepper: Stepper | None = stepper_ref() if stepper_ref is not None else None
    return 1 if stepper is None else stepper.samples.own_weight


class LocalClip:
    """Clip a rank's part of the sum before it is sent; computes the part's norm on creation.

    gradients: this rank's; scale: of the loss; norms are without it.
    allowed_norm: of the sum, if the ranks' gradients are independent; None: any.
    allowed_mean: of the mean gradient; None: any. ratio: the mean gradient's sum of squares over
        that of this rank's gradient.
    applied: the last returned factor.
    """

    def __init__(
        self,
        gradients: Iterable[torch.Tensor | None],
        allowed_norm: float | None,
        scale: float = 1.0,
        allowed_mean: float | None = None,
        ratio: float = 1.0,
    ) -> None:
        self._allowed_norm, self._norm, self.applied = allowed_norm, 0.0, 1.0
        self._allowed_mean, self._ratio = allowed_mean, ratio
        if allowed_norm is not None or allowed_mean is not None:
            self._norm = norm_of([each for each in gradients if each is not None]) / scale

    def factor(self, weight: float, share: float) -> float:
        """Return the factor that clips weight * gradients to the smaller of the allowed norms.

        share: this rank's weight in the sum; all ranks' add up to 1. Independent gradients, each of
        sqrt(share) times the allowed norm, have a sum of that norm: with shares of 1/ranks this is
        Lin et al. 2018, section 3.2. If the norm is not finite, return 1: the step is skipped.
        """
        self.applied = self._factor(weight * self._norm, share)
        return self.applied

    def _factor(self, norm: float, share: float) -> float:
        if not 0.0 < norm < math.inf:
            return 1.0
        allowed = math.inf
        if self._allowed_norm is not None:
            allowed = self._allowed_norm * math.sqrt(share)
        if self._allowed_mean is not None:
            # This rank's gradient is 1 / sqrt(ratio) times as long as the mean gradient, to which
            # it contributes its share.
            allowed = min(allowed, self._allowed_mean * share / math.sqrt(self._ratio))
        return min(1.0, allowed / norm)


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all values of tensors of any dtypes; sparse ones are coalesced.

    Not finite if any value is not. 16-bit values are added in float32; only if that overflows,
    all are added in float64, which takes a CPU thirty times as long.
    """
    parts = [t.detach().coalesce()._values() if t.is_sparse else t.detach() for t in tensors]

    def norm(least: torch.dtype) -> float:
        wide = [torch.promote_types(part.dtype, least) for part in parts]
        norms: dict[torch.device, list[torch.Tensor]] = {}
        for part, dtype in zip(parts, wide, strict=True):
            one = torch.linalg.vector_norm(part, dtype=dtype).double()
            norms.setdefault(part.device, []).append(one)
        # One wait per device.
        return math.hypot(*(float(torch.stack(each).norm()) for each in norms.values()))

    found = norm(torch.float32)
    return norm(torch.float64) if found == math.inf else found


def clip_to_norm(gradients: Sequence[torch.Tensor], allowed: float, scale: float) -> None:
    """Clip gradients that are the same on all ranks to this norm, in place.

    scale: of the loss; the gradients include it, the norm does not.
    """
    norm = agreed_norm(gradients) / scale
    if norm > allowed:
        torch._foreach_mul_([g._values() if g.is_sparse else g for g in gradients], allowed / norm)


def agreed_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the norm of tensors that are the same on all ranks, bit-identical on every rank.

    The kernels add in float64 and in a fixed order, on any CPU and GPU. torch's order depends on
    the processor's instruction set, so that two ranks' norms could differ in the last bit.
    """
    device = device_of(tensors)
    with current_stream(device)():
        flat = []
        for tensor in tensors:
            part = tensor.detach().coalesce()._values() if tensor.is_sparse else tensor.detach()
            if device.type == "cpu":
                part = part.to(device, torch.promote_types(part.dtype, torch.float32))
            flat.append(part.reshape(-1).contiguous())
        if device.type == "cpu":
            squares = [squared_norm(view_array(part)) if part.numel() else 0.0 for part in flat]
        else:
            squares = _squares_on_gpu(flat)
    return math.sqrt(sum(squares))


def _squares_on_gpu(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return each tensor's sum of squares, with one launch and one wait per dtype."""
    squares = [0.0] * len(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for place, square in zip(
            places, squared_norms(located([tensors[place] for place in places])), strict=True
        ):
            squares[place] = square
    return squares
