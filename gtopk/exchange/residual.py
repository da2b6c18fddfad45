"""Residual: the part of the gradients that was not sent yet (error feedback)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.kernels import (
    Gradient,
    Momentum,
    accumulate_and_select,
    add_at,
    clear_at,
    contains,
)
from collectives.vector import SparseVector

from ..buckets.arrays import view_array, view_tensor, zeros
from .draining import share_to_send
from .moments import Moments

AGE: Final = "age"  # of a parameter's moments: a number, where all else has its shape
_HOST: Final = torch.device("cpu")
_PIECE: Final = 1 << 16


class Withheld(NamedTuple):
    """How much this rank holds back.

    square: the sum of the values' squares; mass: of their absolute values.
    sent_mass: of the absolute values that the last step took out.
    """

    square: float = 0.0
    mass: float = 0.0
    sent_mass: float = 0.0


class Residual:
    """What this rank has accumulated and not sent: float32 or float64 [n], on a device.

    The law of every step, coordinate by coordinate and summed over ranks:
    update + residual after = residual before + gradient (weighted, or with momentum correction the
    velocity, or with Adam's correction its step).

    tensors: its memory, where that is another's: the values, and with momentum the velocity.
    masked: whether the velocity of what was applied begins anew.
    betas: of Adam's moments, which gradients go through before they get here; None: they do not.
    sizes: of the parameters side by side; for these moments alone.
    astray: whether entries may be here that another rank is to go on with (`NodeExchange`): the
        same on all ranks.
    """

    def __init__(
        self,
        length: int,
        dtype: np.dtype[Any],
        momentum: float = 0.0,
        device: torch.device = _HOST,
        tensors: list[torch.Tensor] | None = None,
        *,
        masked: bool = False,
        betas: tuple[float, float] | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        empty = partial(zeros, length, dtype, device)
        self.momentum = momentum
        self._masked = masked
        self._names = _names(momentum, betas)
        self._tensors = tensors or [empty() for name in self._names if name != AGE]
        self.values: NDArray[Any] = view_array(self._tensors[0])
        self.velocity = view_array(self._tensors[1]) if momentum else None
        self.moments: Moments | None = None
        if betas:
            self._tensors.append(torch.zeros(len(sizes), dtype=torch.int64))
            _, first, second, ages = self._tensors
            self.moments = Moments(first, second, ages, sizes, betas)
        self.threshold = 0.0  # a guess that spares time, never needed
        self.holds_nothing = True
        self._drained_steps = 0
        self.astray = True
        self._before: list[torch.Tensor] = []
        self._remembers_nothing = True
        self._remembered = False

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Return its memory: the values, and with momentum the velocity."""
        return [view_array(tensor) for tensor in self._tensors]

    def part(self, where: slice) -> Residual:
        """Return the residual of a part of the vector, in the same memory."""
        tensors = [tensor[where] for tensor in self._tensors]
        dtype, device = self.values.dtype, self._tensors[0].device
        length = tensors[0].numel()
        return Residual(length, dtype, self.momentum, device, tensors, masked=self._masked)

    def accumulate_and_select(
        self, gradient: Gradient, k: int, weight: float = 1.0
    ) -> SparseVector:
        """Add weight * gradient, in one array or in parts, and return the k largest entries."""
        self.holds_nothing, self._drained_steps = False, 0
        momentum = None if self.velocity is None else Momentum(self.velocity, self.momentum)
        picked, self.threshold = accumulate_and_select(
            self.values, gradient, k, self.threshold, momentum, weight
        )
        return picked

    def settle(self, picked: SparseVector, returned: SparseVector, update: SparseVector) -> None:
        """Take out what was picked, and put back what returned from the reduction.

        With factor masking, the velocity of what was applied is cleared too:
        of the picks that are in the update, and of which less than half returned. What was dropped
        may return to others, and to its owner although another's pick is in the update; of a pick
        that is alive its rounding error may.
        """
        clear_at(self.values, picked.indices)
        add_at(self.values, returned)
        if self.velocity is not None and self._masked:
            there = picked.where(contains(update.indices, picked.indices))
            applied = abs(self.values[there.indices]) < abs(there.values) / 2
            clear_at(self.velocity, there.indices[applied])

    def add(self, entries: SparseVector) -> None:
        """Put in more, of a vector as long as this one."""
        self.holds_nothing = False
        add_at(self.values, entries)

    def add_dense(self, values: torch.Tensor) -> None:
        """Put in more: [n]."""
        self.holds_nothing = False
        self._tensors[0].add_(values)

    def withheld(self, sent_mass: float) -> Withheld:
        """Return how much is here; reads all of it."""
        if self.holds_nothing:
            return Withheld(sent_mass=sent_mass)
        # In pieces that fit a cache, and whose float32 sums lose little.
        square = mass = 0.0
        for part in self._tensors[0].split(_PIECE):
            square += float(part.dot(part))
            mass += float(part.abs().sum())
        return Withheld(square, mass, sent_mass)

    def remember(self) -> None:
        """Keep a copy of what is here now, for `restore`; the first call makes room for it."""
        self._before = self._before or [torch.empty_like(tensor) for tensor in self._tensors]
        torch._foreach_copy_(self._before, self._tensors)
        self._remembers_nothing = self.holds_nothing
        self._remembered = True

    def restore(self) -> None:
        """Become what was remembered last, to the bit; without such a thing, stay."""
        if not self._remembered:
            return
        torch._foreach_copy_(self._tensors, self._before)
        self.holds_nothing = self._remembers_nothing
        self._remembered = False

    def forget(self) -> None:
        """Let what was remembered be: there is nothing to restore from now on."""
        self._remembered = False

    def after_last_step(self) -> dict[str, torch.Tensor]:
        """Return what it has, by name, without what a step under way has changed: [n].

        "residual"; with momentum "velocity"; with Adam's correction its two moments, and AGE, which
        is [p], of each parameter.
        """
        tensors = self._before if self._remembered else self._tensors
        return dict(zip(self._names, tensors, strict=True))

    def direct(self, gradient: NDArray[Any], share: float) -> None:
        """Make the weighted gradient, in place, Adam's weighted step; share: this rank's."""
        assert self.moments is not None
        self.moments.direct(view_tensor(gradient), share)

    def add_to(self, gradient: NDArray[Any]) -> float:
        """Add a share of what is left to the weighted gradient, in place, and return the share.

        Every entry is to be sent; `draining` says why not all of the residual at once. With
        momentum correction the gradient becomes the velocity, which goes on: there is nothing stale
        to mask when every entry is sent in every step.
        """
        # By torch: CuPy's operators take subnormal float32 for zeros.
        total = view_tensor(gradient)
        if self.velocity is not None:
            total.copy_(self._tensors[1].mul_(self.momentum).add_(total))
        if self.holds_nothing:
            return 1.0
        share = share_to_send(_square(self._tensors[0]), _square(total), self._drained_steps)
        total.add_(self._tensors[0], alpha=share)
        return share

    def take_out(self, share: float) -> None:
        """Forget this share of what was left: it has been sent."""
        if share == 1.0:
            self.clear()
        elif not self.holds_nothing:
            self._drained_steps += 1
            self._tensors[0].mul_(1.0 - share)

    def clear(self) -> None:
        """Forget what was left: all of it has been sent."""
        if not self.holds_nothing:
            self.values.fill(0)
            self.threshold = 0.0
            self.holds_nothing = True


def _square(tensor: torch.Tensor) -> float:
    """Return the sum of squares; a GPU is waited for once."""
    return float(sum(part.dot(part).double() for part in tensor.split(_PIECE)))


def _names(momentum: float, betas: tuple[float, float] | None) -> tuple[str, ...]:
    """Return what there is, by name."""
    if betas:
        return "residual", "first_moment", "second_moment", AGE
    return ("residual", "velocity") if momentum else ("residual",)
