"""Residual: the part of the gradients that was not sent yet (error feedback).

Draining: how a residual leaves where gradients are sent whole, without a jolt.

What sparse steps have left is the sum of many steps' gradients. Sent in one step, it moves the
model as far as all of these steps at once, and momentum carries on with it: a model that had nearly
converged is thrown off. So each step sends a share of it half as long as that step's own gradient:

    residual   |e|  ..|..|..|..      two gradients long: gone after four steps
    sent            |g|/2 each       beside a gradient of |g|

Whatever direction it has, their sum points downhill still: <g, g + s> >= |g|^2 / 2. Nothing is lost
on the way: what is not sent yet, or 16 bits cannot hold of the sum, stays in the residual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
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
from collectives.kernels.device import Step, open_step
from collectives.transports import Transport
from collectives.vector import SparseVector, is_on_device

from .adamw import AdamSteps, OwnMoments
from .buckets.arrays import view_array, view_tensor, zeros
from .moments import Moments

PART: Final = 0.5  # of the gradient's length
# However short gradients are, nothing of it is left after so many steps.
MOST_STEPS: Final = 1000


def share_to_send(held_square: float, gradient_square: float, steps: int) -> float:
    """Return the share of the residual to send now.

    held_square, gradient_square: squared norms, of the residual and of what is sent in any case.
    steps: that have sent a share of it already.
    """
    if not held_square:
        return 1.0
    ratio = PART * math.sqrt(gradient_square / held_square)
    if not math.isfinite(ratio):
        return 0.0  # the step will not count
    return min(1.0, max(ratio, 1.0 / max(1, MOST_STEPS - steps)))


# Of a parameter's moments, a number, and row sums of its squares; all else has its shape.
AGE: Final = "age"
SECOND_MOMENT: Final = "second_moment"
ROWS: Final = "row_squares"
# What rounding took of sums that this rank owns (`ShardExchange`).
OWNER_ERROR: Final = "owner_error"
_HOST: Final = torch.device("cpu")
_PIECE: Final = 1 << 16  # fits a cache


class ResidualSize(NamedTuple):
    """How large this rank's residual is.

    square: the sum of the values' squares; mass: of their absolute values.
    sent_mass: of the absolute values that the last step took out.
    """

    square: float = 0.0
    mass: float = 0.0
    sent_mass: float = 0.0


class Memory(NamedTuple):
    """One vector of a residual, as a tensor and as the kernels' array of the same memory."""

    tensor: torch.Tensor
    array: NDArray[Any]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """Return a tensor's memory."""
        return cls(tensor, view_array(tensor))

    def like(self) -> Memory:
        """Return more memory of its kind, with whatever is in it."""
        return Memory.of(torch.empty_like(self.tensor))


class Residual:
    """What this rank has accumulated and not sent: float32 or float64 [n], on a device.

    The law of every step, coordinate by coordinate and summed over ranks:
    update + residual after = residual before + gradient (weighted, or with momentum correction the
    velocity, or with Adam's correction its step).

    A step can be undone, also after its update was applied: from `remember` to `forget` whatever is
    changed is written beside what was there, in a second buffer, and the two are swapped:

        remember      accumulate            the step counts      or else, restore
        [a]  [ ]      [a] --+ g--> [a']     [ ]  [a']            [a]  [ ]

    masked: whether the velocity of what was applied begins anew.
    betas: of Adam's moments, which gradients go through before they get here; None: they do not.
    sizes: of the parameters side by side; for these moments alone.
    astray: whether entries may be here that another rank is to go on with (`NodeExchange`,
        `ShardExchange`): the same on all ranks.
    """

    def __init__(
        self,
        length: int,
        dtype: np.dtype[Any],
        momentum: float = 0.0,
        device: torch.device = _HOST,
        *,
        masked: bool = False,
        betas: tuple[float, float] | None = None,
        sizes: Sequence[int] = (),
        has_owner_errors: bool = False,
    ) -> None:
        self.momentum = momentum
        self._masked = masked
        self._names = _names(momentum, betas) + (OWNER_ERROR,) * has_owner_errors
        self._memory = [
            Memory.of(torch.zeros(len(sizes), dtype=torch.int64))
            if name == AGE
            else Memory.of(zeros(length, dtype, device))
            for name in self._names
        ]
        self._beside: list[Memory] = []
        self._swapped: set[int] = set()  # what was changed since `remember`: the rest is beside
        self._betas, self._sizes = betas, sizes
        self.threshold = 0.0  # a guess that spares time, never needed
        self.holds_nothing = True
        self._drained_steps = 0
        self.astray = True
        # What was remembered besides memory: holds_nothing, steps that drained, astray.
        self._remembered: tuple[bool, int, bool] | None = None
        # Of which memory, where, what; None: no parameter is set aside, on any rank.
        self._aside: list[tuple[int, slice, torch.Tensor]] | None = None
        self._step: Step | None = None  # on a GPU
        self._steps: AdamSteps | None = None

    def make_steps(self, steps: AdamSteps) -> None:
        """Have gradients go through these steps before they get here; before the first of them."""
        own = OwnMoments(
            torch.zeros_like(self._memory[0].tensor),
            torch.zeros_like(self._memory[0].tensor),
            torch.zeros(len(steps.rows), dtype=torch.int64, device="cpu"),
            torch.zeros(sum(steps.rows), dtype=self._memory[0].tensor.dtype, device="cpu"),
        )
        self._steps = steps
        others = [*zip(self._names, self._memory, strict=True)][1:]
        self._names = "residual", "first_moment", SECOND_MOMENT, AGE, ROWS
        more = (own.first, own.second, own.ages, own.rows)
        self._memory = [self._memory[0], *map(Memory.of, more)]
        for name, memory in others:  # behind them: owner errors
            self._names += (name,)
            self._memory.append(memory)

    @property
    def rows(self) -> Sequence[int]:
        """Return how many rows each parameter has in ROWS; of AdamW's steps alone."""
        return self._steps.rows if self._steps is not None else ()

    def read_options(self) -> float | None:
        """Read what AdamW's steps go by; return this rank's usual share of the sum. None: none."""
        if self._steps is None:
            return None
        self._steps.read(OwnMoments(*(memory.tensor for memory in self._memory[1:5])))
        return self._steps.share

    def options_are_as_read(self) -> bool:
        """Tell whether the rate, say, has stayed what it was when it was read."""
        return self._steps is None or self._steps.is_as_read()

    @property
    def values(self) -> NDArray[Any]:
        """Return what is held: [n]."""
        return self._memory[0].array

    @property
    def velocity(self) -> NDArray[Any] | None:
        """Return the velocity, [n], with momentum correction."""
        return self._memory[1].array if self.momentum else None

    @property
    def owner_errors(self) -> NDArray[Any]:
        """Return what rounding took of the sums that this rank owns: [n]."""
        return self._memory[self._names.index(OWNER_ERROR)].array

    def keep_owner_errors(self, indices: NDArray[Any], values: NDArray[Any]) -> None:
        """Have these in the place of what was there."""
        self._writable(self._names.index(OWNER_ERROR)).array[indices] = values

    @property
    def has_moments(self) -> bool:
        """Tell whether gradients go through Adam's moments before they get here."""
        return self._betas is not None or self._steps is not None

    @property
    def learns(self) -> bool:
        """Tell whether the ranks share a second moment, for which they exchange a sample."""
        return self._steps is not None and self._steps.share < 1.0

    def state_before(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the optimizer's state of parameters without a step that may be undone yet."""
        return {} if self._steps is None else self._steps.state_before()

    def row_sums(self) -> tuple[float, float]:
        """Return sampled squares of the mean gradient, and of this rank's; where it learns."""
        assert self._steps is not None
        own = float(self.after_last_step()[ROWS].sum()) / self._steps.share
        return self._steps.square_of_mean(), own

    def arrays(self) -> list[NDArray[Any]]:
        """Return its memory, to be changed in place: the values, and with momentum the velocity."""
        return [self._writable(number).array for number in range(len(self._memory))]

    def accumulate(self, gradient: NDArray[Any]) -> None:
        """Add a weighted gradient, [n], or the velocity that it makes, which is written there."""
        total = view_tensor(gradient)
        if self.momentum:
            total.copy_(self._writable(1).tensor.mul_(self.momentum).add_(total))
        self.holds_nothing, self._drained_steps = False, 0
        self._writable(0).tensor.add_(total)

    def accumulate_and_select(
        self, gradient: Gradient, k: int, weight: float = 1.0, where: slice | None = None
    ) -> SparseVector:
        """Add weight * gradient, in one array or in parts, and return the k largest entries.

        where: the part of the vector that the gradient is of, and the entries are selected from;
            None: all of it.
        """
        self.holds_nothing, self._drained_steps = False, 0
        if where is not None:
            return self._add_to_part(gradient, k, weight, where)
        # The pass itself writes the sum beside what is remembered.
        into, faster = self._into(0), self._into(1) if self.momentum else None
        beside = None if into is None else into.array
        momentum = None
        if self.momentum:
            memory = None if faster is None else faster.array
            momentum = Momentum(self._memory[1].array, self.momentum, memory)
        if is_on_device(self.values):
            if self._step is None or self._step.k != k:
                self._step = open_step(self.values, k)
            picked, self.threshold = self._step(
                self.values, gradient, momentum, weight, beside, self.threshold
            )
        else:
            picked, self.threshold = accumulate_and_select(
                self.values, gradient, k, self.threshold, momentum, weight, beside
            )
        for number, written in enumerate((into, faster)):
            if written is not None:
                self._swap(number)
        return picked

    def _add_to_part(self, gradient: Gradient, k: int, weight: float, where: slice) -> SparseVector:
        values = self._writable(0).array[where]
        velocity = self._writable(1).array[where] if self.momentum else None
        momentum = None if velocity is None else Momentum(velocity, self.momentum)
        picked, self.threshold = accumulate_and_select(
            values, gradient, k, self.threshold, momentum, weight
        )
        return picked

    def settle(
        self,
        picked: SparseVector,
        returned: SparseVector,
        update: SparseVector,
        where: slice | None = None,
    ) -> None:
        """Take out what was picked, and put back what returned from the reduction.

        With factor masking, the velocity of what was applied is cleared too:
        of the picks that are in the update, and of which less than half returned. What was dropped
        may return to others, and to its owner although another's pick is in the update; of a pick
        that is alive its rounding error may.
        """
        here = slice(None) if where is None else where
        values = self._writable(0).array[here]
        clear_at(values, picked.indices)
        add_at(values, returned)
        if self.momentum and self._masked:
            there = picked.where(contains(update.indices, picked.indices))
            applied = abs(values[there.indices]) < abs(there.values) / 2
            clear_at(self._writable(1).array[here], there.indices[applied])

    def add(self, entries: SparseVector) -> None:
        """Put in more, of a vector as long as this one."""
        self.holds_nothing = False
        add_at(self._writable(0).array, entries)

    def add_dense(self, values: torch.Tensor) -> None:
        """Put in more: [n]."""
        self.holds_nothing = False
        self._writable(0).tensor.add_(values)

    def residual_size(self, sent_mass: float) -> ResidualSize:
        """Return how much is here; reads all of it."""
        if self.holds_nothing:
            return ResidualSize(sent_mass=sent_mass)
        here = self._memory[0].tensor
        if here.is_cuda:
            norms = [torch.linalg.vector_norm(here, o, dtype=torch.float64) for o in (2, 1)]
            norm, mass = torch.stack(norms).tolist()
            return ResidualSize(norm * norm, mass, sent_mass)
        # In pieces that fit a cache, and whose float32 sums lose little.
        square = mass = 0.0
        for part in here.split(_PIECE):
            square += float(part.dot(part))
            mass += float(part.abs().sum())
        return ResidualSize(square, mass, sent_mass)

    def remember(self) -> None:
        """Let `restore` bring back what is here now; the first call makes room for it."""
        self._beside = self._beside or [one.like() for one in self._memory]
        self.forget()
        self._remembered = self.holds_nothing, self._drained_steps, self.astray

    def restore(self) -> None:
        """Become what was remembered last, to the bit; without such a thing, stay."""
        if self._remembered is None:
            return
        for number in tuple(self._swapped):
            self._swap(number)
        if self._steps is not None:
            self._steps.undo()
        self.holds_nothing, self._drained_steps, self.astray = self._remembered
        self._aside = None
        self.forget()

    def forget(self) -> None:
        """Let what was remembered be: there is nothing to restore from now on."""
        self._remembered = None
        self._swapped.clear()
        if self._steps is not None:
            self._steps.forget()

    def set_aside(self, parts: Mapping[int, slice]) -> None:
        """Keep what is here of some parameters out of a step, after `remember`, until `bring_back`.

        parts: where they lie, by their place among `sizes`; the same on all ranks.
        """
        self._aside = []
        row_ends = [*itertools.accumulate(self.rows, initial=0)]
        for number, name in enumerate(self._names):
            if number == 0 and self.holds_nothing:
                continue
            tensor = self._writable(number).tensor
            for place, part in parts.items():
                where = part
                if name == AGE:
                    where = slice(place, place + 1)
                elif name == ROWS:
                    where = slice(*row_ends[place : place + 2])
                self._aside.append((number, where, tensor[where].clone()))
                if name not in (AGE, ROWS):
                    tensor[where] = 0

    def bring_back(self) -> None:
        """Have again what was set aside, once the update is applied."""
        if self._aside is None:
            return
        assert self._remembered is not None
        places = []
        for number, where, values in self._aside:
            here = self._writable(number).tensor[where]
            name = self._names[number]
            if name in (AGE, ROWS):
                here.copy_(values)  # the step counts for others
            else:
                here.add_(values)  # beside what may have returned from the reduction
            if name == AGE:
                places.append(where.start)
            self.holds_nothing &= number != 0
        if self._steps is not None:
            self._steps.leave(places)
        self.astray |= self._remembered[2]  # it was not there to be brought home
        self._aside = None

    @property
    def has_aside(self) -> bool:
        """Tell whether any value that is not zero is set aside; waits for a GPU."""
        return any(number == 0 and bool(values.any()) for number, _, values in self._aside or ())

    def _swap(self, number: int) -> None:
        memory, beside = self._memory, self._beside
        memory[number], beside[number] = beside[number], memory[number]
        self._swapped ^= {number}

    def _into(self, number: int) -> Memory | None:
        """Return where to write what will take the place of this memory; None: there itself."""
        if self._remembered is None or number in self._swapped:
            return None
        return self._beside[number]

    def _writable(self, number: int) -> Memory:
        """Return memory to be changed in place: a copy, where what is in it is remembered."""
        into = self._into(number)
        if into is not None:
            into.tensor.copy_(self._memory[number].tensor)
            self._swap(number)
        return self._memory[number]

    def after_last_step(self) -> dict[str, torch.Tensor]:
        """Return what it has, by name, without what a step that may be undone has changed: [n].

        "residual"; with momentum "velocity"; with Adam's correction its two moments, and AGE, which
        is [p], of each parameter; where steps are made in AdamW's place ROWS, too, [all rows].
        """
        return {
            name: (self._beside if number in self._swapped else self._memory)[number].tensor
            for number, name in enumerate(self._names)
        }

    def direct(self, gradient: NDArray[Any], share: float, transport: Transport) -> float:
        """Make the weighted gradient, in place, Adam's weighted step; share: this rank's.

        Returns the seconds that ranks took to tell each other of their gradients for that.
        """
        if self._steps is not None:
            own = OwnMoments(*(self._writable(number).tensor for number in (1, 2, 3, 4)))
            return self._steps.make(view_tensor(gradient), share, transport, own)
        assert self._betas is not None
        if share:
            first, second, ages = (self._writable(number).tensor for number in (1, 2, 3))
            moments = Moments(first, second, ages, self._sizes, self._betas)
            moments.direct(view_tensor(gradient), share)
        return 0.0

    def add_to(self, gradient: NDArray[Any]) -> float:
        """Add a share of what is left to the weighted gradient, in place, and return the share.

        Every entry is to be sent; `draining` says why not all of the residual at once. With
        momentum correction the gradient becomes the velocity, which goes on: there is nothing stale
        to mask when every entry is sent in every step.
        """
        # By torch: CuPy's operators take subnormal float32 for zeros.
        total = view_tensor(gradient)
        if self.momentum:
            total.copy_(self._writable(1).tensor.mul_(self.momentum).add_(total))
        if self.holds_nothing:
            return 1.0
        here = self._memory[0].tensor
        held, coming = _squares(here, total)
        share = share_to_send(held, coming, self._drained_steps)
        total.add_(here, alpha=share)
        return share

    def take_out(self, share: float) -> None:
        """Forget this share of what was left: it has been sent."""
        if share == 1.0:
            self.clear()
        elif not self.holds_nothing:
            self._drained_steps += 1
            self._writable(0).tensor.mul_(1.0 - share)

    def clear(self) -> None:
        """Forget what was left: all of it has been sent."""
        if not self.holds_nothing:
            if self._into(0) is not None:
                self._swap(0)
            self._memory[0].tensor.zero_()  # by torch, on its current stream
            self.threshold = 0.0
            self.holds_nothing = True


def _squares(*tensors: torch.Tensor) -> list[float]:
    """Return the sum of squares of each; a GPU is waited for once."""
    if tensors[0].is_cuda:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
        return [norm * norm for norm in torch.stack(norms).tolist()]
    return [float(sum(part.dot(part).double() for part in t.split(_PIECE))) for t in tensors]


def _names(momentum: float, betas: tuple[float, float] | None) -> tuple[str, ...]:
    """Return what there is, by name."""
    if betas:
        return "residual", "first_moment", SECOND_MOMENT, AGE
    return ("residual", "velocity") if momentum else ("residual",)
