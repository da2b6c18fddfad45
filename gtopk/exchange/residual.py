"""Residual: the part of a rank's gradients that it has not sent yet (error feedback)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
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
from .buckets.arrays import Memory, view_tensor, zeros
from .moments import make_adam_step

DRAIN_RATIO: Final = 0.5  # norm of what a dense step sends of it, relative to the gradient's norm
MAX_DRAIN_STEPS: Final = 1000  # the residual is drained after these, however small gradients are


def drain_fraction(residual_square: float, gradient_square: float, steps: int) -> float:
    """Return the fraction of the residual that a dense step sends along with its gradient.

    The residual of sparse steps is the sum of many gradients. Sent in one step, it would move the
    model as far as all of them together, and momentum would continue in that direction: a model
    that had nearly converged would be thrown off. So each step sends a part of it that is half as
    long as the step's own gradient:

        residual   |e|  ..|..|..|..      two gradients long: gone after four steps
        sent            |g|/2 each       beside a gradient of |g|

    Whatever the direction of this part s, the sum still points downhill: <g, g + s> >= |g|^2 / 2.
    Nothing is lost: entries not sent yet, and parts that 16 bits cannot hold, stay in the residual.

    residual_square, gradient_square: squared norms of the residual and of the gradient.
    steps: how many steps have already sent a fraction.
    """
    if not residual_square:
        return 1.0
    ratio = DRAIN_RATIO * math.sqrt(gradient_square / residual_square)
    if not math.isfinite(ratio):
        return 0.0  # a norm is not finite: the step will not count
    # The second term grows to 1/3, 1/2, then 1, so that nothing stays forever.
    return min(1.0, max(ratio, 1.0 / max(1, MAX_DRAIN_STEPS - steps)))


# Names of a residual's parts. AGE has one number per parameter, ROWS one sum of squares per row;
# all other parts have the parameter's shape.
AGE: Final = "age"
SECOND_MOMENT: Final = "second_moment"
ROWS: Final = "row_squares"
# The rounding errors of the sums that this rank owns (`ShardExchange`).
OWNER_ERROR: Final = "owner_error"
_HOST: Final = torch.device("cpu")
_PIECE: Final = 1 << 16  # fits in a cache


class ResidualSize(NamedTuple):
    """The size of this rank's residual.

    square: the sum of squares of the values; mass: the sum of their absolute values.
    sent_mass: the sum of absolute values that the last step removed.
    """

    square: float = 0.0
    mass: float = 0.0
    sent_mass: float = 0.0


class Residual:
    """The values that this rank has accumulated and not sent: float32 or float64 [n], on a device.

    The conservation law of every step, per coordinate and summed over ranks:
    update + residual after = residual before + gradient. The gradient is weighted; with momentum
    correction the velocity replaces it, with Adam's correction Adam's step.

    A step can be undone, even after its update was applied. From `snapshot` to `drop_snapshot`
    changes are written to a second buffer, and the two are swapped:

        snapshot      accumulate            the step counts      or else, restore
        [a]  [ ]      [a] --+ g--> [a']     [ ]  [a']            [a]  [ ]

    masked: whether to clear the velocity of applied entries (factor masking).
    betas: of Adam's moments, which gradients go through first; None: no moments.
    sizes: of the parameters, which lie side by side; empty: one parameter is the whole vector.
    has_moments: whether gradients go through Adam's moments first.
    shares_second_moment: whether the ranks share a second moment, for which they exchange a sample.
    may_be_misplaced: whether there may be entries that belong to another rank (`NodeExchange`,
        `ShardExchange`); the same on all ranks.
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
        self._names: tuple[str, ...] = ("residual", "velocity") if momentum else ("residual",)
        if betas:
            self._names = "residual", "first_moment", SECOND_MOMENT, AGE
        self._names += (OWNER_ERROR,) * has_owner_errors
        self._memory = [
            Memory.of(torch.zeros(len(sizes), dtype=torch.int64, device="cpu"))
            if name == AGE
            else Memory.of(zeros(length, dtype, device))
            for name in self._names
        ]
        # Where parameters start and end, in a vector and in ROWS.
        self._ends = [*itertools.accumulate(sizes or [length], initial=0)]
        self._row_ends: list[int] = []
        self._on_gpu = is_on_device(self.values)
        self._second_buffers: list[Memory] = []
        self._swapped: set[int] = set()  # parts changed since `snapshot`: see _second_buffers
        self._betas, self._sizes = betas, sizes
        self.has_moments, self.shares_second_moment = betas is not None, False
        self.threshold = 0.0  # a guess that affects the selection's speed, never its result
        self.is_empty = True
        self._drained_steps = 0
        self.may_be_misplaced = True
        # At `snapshot`: is_empty, _drained_steps, may_be_misplaced.
        self._snapshot: tuple[bool, int, bool] | None = None
        # (place in _memory, place of the parameter, values); None: nothing is stashed on any rank.
        self._stashed: list[tuple[int, int, torch.Tensor]] | None = None
        self._step: Step | None = None  # accumulates and selects on a GPU
        # Picked and returned in the last step; None if that was dense.
        self._last_sent: tuple[SparseVector, SparseVector] | None = None
        self._steps: AdamSteps | None = None

    def hold_adam_moments(self, steps: AdamSteps) -> None:
        """Add room for AdamW's moments; call it before the first step. Its steps then come here."""
        own = OwnMoments(
            torch.zeros_like(self._memory[0].tensor),
            torch.zeros_like(self._memory[0].tensor),
            torch.zeros(len(steps.rows), dtype=torch.int64, device="cpu"),
            torch.zeros(sum(steps.rows), dtype=self._memory[0].tensor.dtype, device="cpu"),
        )
        self._steps = steps
        self._row_ends = [*itertools.accumulate(steps.rows, initial=0)]
        self.has_moments, self.shares_second_moment = True, steps.share < 1.0
        others = [*zip(self._names, self._memory, strict=True)][1:]
        self._names = "residual", "first_moment", SECOND_MOMENT, AGE, ROWS
        more = (own.first, own.second, own.ages, own.rows)
        self._memory = [self._memory[0], *map(Memory.of, more)]
        for name, memory in others:  # owner errors come last
            self._names += (name,)
            self._memory.append(memory)

    def read_options(self) -> None:
        """Read the options for AdamW's next step, such as the learning rate."""
        assert self._steps is not None
        self._steps.read(OwnMoments(*(memory.tensor for memory in self._memory[1:5])))

    @property
    def values(self) -> NDArray[Any]:
        """Return the residual's values, [n]."""
        return self._memory[0].array

    @property
    def owner_errors(self) -> NDArray[Any]:
        """Return the rounding errors of the sums that this rank owns, [n]."""
        return self._memory[self._names.index(OWNER_ERROR)].array

    def keep_owner_errors(self, indices: NDArray[Any], values: NDArray[Any]) -> None:
        """Replace the owner errors at these indices."""
        self._writable(self._names.index(OWNER_ERROR)).array[indices] = values

    def state_before(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the parameters' optimizer state as before a step that may still be undone."""
        return {} if self._steps is None else self._steps.state_before()

    def row_sums(self) -> tuple[float, float]:
        """Return sums of sampled squares for a shared second moment: the mean's and this rank's."""
        self.read_options()  # the mean's are in the optimizer's state, which may just be loaded
        assert self._steps is not None
        own = float(self.after_last_step()[ROWS].sum()) / self._steps.share
        return self._steps.square_of_mean(), own

    def arrays(self) -> list[NDArray[Any]]:
        """Return all arrays, for changes in place: the values first, then the other parts."""
        return [self._writable(number).array for number in range(len(self._memory))]

    def accumulate(self, gradient: NDArray[Any]) -> None:
        """Add a weighted gradient, [n]; with momentum, first turn it into the velocity in place."""
        total = view_tensor(gradient)
        if self.momentum:
            total.copy_(self._writable(1).tensor.mul_(self.momentum).add_(total))
        self.is_empty, self._drained_steps = False, 0
        self._writable(0).tensor.add_(total)

    def accumulate_and_select(
        self, gradient: Gradient, k: int, weight: float = 1.0, where: slice | None = None
    ) -> SparseVector:
        """Add weight * gradient, in one array or in parts, and return the k largest entries.

        where: the part that the gradient covers and that entries are selected from; None: all.
        """
        self.is_empty, self._drained_steps = False, 0
        if where is not None:
            return self._add_to_part(gradient, k, weight, where)
        # The kernel writes the sum into the second buffer, so no copy is needed.
        values_target = self._target_buffer(0)
        velocity_target = self._target_buffer(1) if self.momentum else None
        target_array = None if values_target is None else values_target.array
        momentum = None
        if self.momentum:
            velocity_array = None if velocity_target is None else velocity_target.array
            momentum = Momentum(self._memory[1].array, self.momentum, velocity_array)
        if self._on_gpu:
            # A Step is for a fixed k: its buffers and its CUDA graph have that size.
            if self._step is None or self._step.k != k:
                self._step = open_step(self.values, k)
            picked, self.threshold = self._step(
                self.values, gradient, momentum, weight, target_array, self.threshold
            )
        else:
            picked, self.threshold = accumulate_and_select(
                self.values, gradient, k, self.threshold, momentum, weight, target_array
            )
        for number, written in enumerate((values_target, velocity_target)):
            if written is not None:
                self._swap_buffers(number)
        return picked

    def _add_to_part(self, gradient: Gradient, k: int, weight: float, where: slice) -> SparseVector:
        # Copy all of it first: the kernel would only write a part of the other buffer.
        values = self._writable(0).array[where]
        velocity = self._writable(1).array[where] if self.momentum else None
        momentum = None if velocity is None else Momentum(velocity, self.momentum)
        picked, self.threshold = accumulate_and_select(
            values, gradient, k, self.threshold, momentum, weight
        )
        return picked

    def remove_sent(
        self,
        picked: SparseVector,
        returned: SparseVector,
        update: SparseVector,
        where: slice | None = None,
    ) -> None:
        """Remove the picks, and add the entries that returned from the reduction.

        Factor masking also clears the velocity of applied picks: those that are in the update and
        of which less than half returned. The index alone does not decide: another rank's pick may
        have put it into the update, while this rank's pick was dropped and returned.
        """
        self._last_sent = picked, returned
        here = slice(None) if where is None else where
        values = self._writable(0).array[here]
        # Clear all picks, then add the returned entries: a dropped pick comes back whole, a sent
        # one leaves its rounding error, and some returned entries are other ranks' picks.
        clear_at(values, picked.indices)
        add_at(values, returned)
        if self.momentum and self._masked:
            in_update = picked.where(contains(update.indices, picked.indices))
            applied = abs(values[in_update.indices]) < abs(in_update.values) / 2
            clear_at(self._writable(1).array[here], in_update.indices[applied])

    def add(self, entries: SparseVector) -> None:
        """Add entries of a vector as long as this one."""
        self.is_empty = False
        add_at(self._writable(0).array, entries)

    def add_dense(self, values: torch.Tensor) -> None:
        """Add values, [n]."""
        self.is_empty = False
        self._writable(0).tensor.add_(values)

    def decay(self, factor: float) -> None:
        """Multiply the values by a factor."""
        self._writable(0).tensor.mul_(factor)

    def residual_size(self) -> ResidualSize:
        """Return the size of the residual after the last step; reads all of it."""
        sent_mass = 0.0
        if self._last_sent is not None:
            picked, returned = (float(abs(vector.values).sum()) for vector in self._last_sent)
            sent_mass = max(0.0, picked - returned)
        if self.is_empty:
            return ResidualSize(sent_mass=sent_mass)
        values = self._memory[0].tensor
        if values.is_cuda:
            norms = [torch.linalg.vector_norm(values, o, dtype=torch.float64) for o in (2, 1)]
            norm, mass = torch.stack(norms).tolist()
            return ResidualSize(norm * norm, mass, sent_mass)
        # In pieces that fit in a cache, and in which float32 sums lose little.
        square = mass = 0.0
        for part in values.split(_PIECE):
            square += float(part.dot(part))
            mass += float(part.abs().sum())
        return ResidualSize(square, mass, sent_mass)

    def snapshot(self) -> None:
        """Save the current state for `restore`; the first call allocates memory for it."""
        self._second_buffers = self._second_buffers or [memory.like() for memory in self._memory]
        self.drop_snapshot()
        self._snapshot = self.is_empty, self._drained_steps, self.may_be_misplaced

    def restore(self) -> None:
        """Return to the last `snapshot`, bit for bit; do nothing without one."""
        if self._snapshot is None:
            return
        # Swap instead of subtracting the added values, which would round once more.
        for number in tuple(self._swapped):
            self._swap_buffers(number)
        if self._steps is not None:
            self._steps.undo()
        self.is_empty, self._drained_steps, self.may_be_misplaced = self._snapshot
        self._stashed = None
        self.drop_snapshot()

    def drop_snapshot(self) -> None:
        """Drop the snapshot: from now on there is nothing to restore."""
        self._snapshot = None
        self._swapped.clear()
        if self._steps is not None:
            self._steps.drop_snapshot()

    def stash(self, places: Collection[int]) -> None:
        """Exclude some parameters' residuals from a step, from `snapshot` to `unstash`.

        places: of these parameters in `sizes`; the same on all ranks.
        """
        self._stashed = []
        if self._steps is not None:
            self._steps.exclude(places)
        for number, name in enumerate(self._names):
            if number == 0 and self.is_empty:
                continue
            tensor = self._writable(number).tensor
            for place in places:
                where = self._location(name, place)
                self._stashed.append((number, place, tensor[where].clone()))
                # Ages and row sums are not sent, so they need no clearing.
                if name not in (AGE, ROWS):
                    tensor[where] = 0

    def unstash(self) -> None:
        """Put the stashed values back, once the update is applied."""
        if self._stashed is None:
            return
        assert self._snapshot is not None
        places = []
        for number, place, values in self._stashed:
            name = self._names[number]
            here = self._writable(number).tensor[self._location(name, place)]
            if name in (AGE, ROWS):
                here.copy_(values)  # for these parameters the step did not happen
            else:
                here.add_(values)  # meanwhile entries may have returned from the reduction
            if name == AGE:
                places.append(place)
            self.is_empty &= number != 0
        if self._steps is not None:
            self._steps.undo_part(places)
        self.may_be_misplaced |= self._snapshot[2]  # stashed values were not moved to owners
        self._stashed = None

    @property
    def has_stashed(self) -> bool:
        """Return whether any stashed value is nonzero; waits for a GPU."""
        return any(number == 0 and bool(values.any()) for number, _, values in self._stashed or ())

    def _swap_buffers(self, number: int) -> None:
        memory, second = self._memory, self._second_buffers
        memory[number], second[number] = second[number], memory[number]
        self._swapped ^= {number}

    def _target_buffer(self, number: int) -> Memory | None:
        """Return the second buffer to write this part's new values to; None: write in place."""
        if self._snapshot is None or number in self._swapped:
            return None
        return self._second_buffers[number]

    def _writable(self, number: int) -> Memory:
        """Return this part's memory for changes in place; copy it first if a snapshot needs it."""
        target = self._target_buffer(number)
        if target is not None:
            target.tensor.copy_(self._memory[number].tensor)
            self._swap_buffers(number)
        return self._memory[number]

    def after_last_step(self) -> dict[str, torch.Tensor]:
        """Return the parts by name, as they were before a step that may still be undone: [n].

        "residual"; with momentum "velocity"; with Adam's correction the two moments and AGE, [p],
        one number per parameter; if AdamW's steps are computed before the exchange also ROWS,
        [all rows].
        """
        return {
            name: (self._second_buffers if number in self._swapped else self._memory)[number].tensor
            for number, name in enumerate(self._names)
        }

    def part(self, name: str, place: int) -> torch.Tensor:
        """Return a view of one part of a parameter after the last step: [its elements].

        place: the parameter's in `sizes`. AGE is a scalar; ROWS has one value per row.
        """
        number = self._names.index(name)
        memory = self._second_buffers if number in self._swapped else self._memory
        return memory[number].tensor[self._location(name, place)]

    def parts(self, place: int) -> dict[str, torch.Tensor]:
        """Return all of a parameter's parts by name, as `part` does."""
        return {name: self.part(name, place) for name in self._names}

    def _location(self, name: str, place: int) -> int | slice:
        """Return the location of a parameter's part in the memory of this name."""
        if name == AGE:
            return place
        ends = self._row_ends if name == ROWS else self._ends
        return slice(ends[place], ends[place + 1])

    def to_adam_step(self, gradient: NDArray[Any], share: float, transport: Transport) -> float:
        """Turn the weighted gradient into Adam's weighted step, in place.

        share: this rank's weight in the sum. Returns the seconds spent on exchanging samples.
        """
        if self._steps is not None:
            own = OwnMoments(*(self._writable(number).tensor for number in (1, 2, 3, 4)))
            return self._steps.make_step(view_tensor(gradient), share, transport, own)
        assert self._betas is not None
        if share:
            moments = [self._writable(number).tensor for number in (1, 2, 3)]
            make_adam_step(view_tensor(gradient), share, moments, self._sizes, self._betas)
        return 0.0

    def add_fraction_to(self, gradient: NDArray[Any]) -> float:
        """Add a fraction of the residual to the weighted gradient, in place; return the fraction.

        For a step that sends every entry; `drain_fraction` says why the residual is not sent all at
        once. With momentum correction the gradient first becomes the velocity. None of that is
        masked: if every step sends every entry, none is stale.
        """
        # Use torch: CuPy's operators flush subnormal float32 to zero.
        total = view_tensor(gradient)
        if self.momentum:
            total.copy_(self._writable(1).tensor.mul_(self.momentum).add_(total))
        if self.is_empty:
            return 1.0
        values = self._memory[0].tensor
        residual_square, gradient_square = _squares(values, total)
        fraction = drain_fraction(residual_square, gradient_square, self._drained_steps)
        total.add_(values, alpha=fraction)
        return fraction

    def subtract_fraction(self, fraction: float) -> None:
        """Remove this fraction of the residual, which has been sent."""
        self._last_sent = None
        if fraction == 1.0:
            self.clear()
        elif not self.is_empty:
            self._drained_steps += 1
            self._writable(0).tensor.mul_(1.0 - fraction)

    def clear(self) -> None:
        """Empty the residual: all of it has been sent."""
        if not self.is_empty:
            # No copy is needed: a snapshot keeps the old values, and the other buffer is zeroed.
            if self._target_buffer(0) is not None:
                self._swap_buffers(0)
            self._memory[0].tensor.zero_()  # by torch, on its current stream
            self.threshold = 0.0
            self.is_empty = True


def _squares(*tensors: torch.Tensor) -> list[float]:
    """Return the sum of squares of each tensor; waits for a GPU once."""
    if tensors[0].is_cuda:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
        return [norm * norm for norm in torch.stack(norms).tolist()]
    return [float(sum(part.dot(part).double() for part in t.split(_PIECE))) for t in tensors]
