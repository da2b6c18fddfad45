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

PART: Final = 0.5  # how long the part is that a dense step sends, over the gradient's length
MOST_STEPS: Final = 1000  # the residual is sent after these, however short gradients are


def drain_fraction(held_square: float, gradient_square: float, steps: int) -> float:
    """Return the fraction of the residual that a dense step sends along with its gradient.

    What sparse steps have left is the sum of many gradients. Sent in one step, it would move the
    model as far as all of them at once, and momentum would go on with it: a model that had nearly
    converged is thrown off. So what each step sends of it is half as long as its own gradient:

        residual   |e|  ..|..|..|..      two gradients long: gone after four steps
        sent            |g|/2 each       beside a gradient of |g|

    For any direction of this part s the sum still points downhill: <g, g + s> >= |g|^2 / 2. Nothing
    is lost: entries not sent yet, and parts that 16 bits cannot hold, stay in the residual.

    held_square, gradient_square: squared norms of the residual and of the gradient.
    steps: how many have sent a fraction already.
    """
    if not held_square:
        return 1.0
    ratio = PART * math.sqrt(gradient_square / held_square)
    if not math.isfinite(ratio):
        return 0.0  # a norm is not finite: the step will not count
    # The second term grows to a third, a half, then all of what is left: nothing stays for ever.
    return min(1.0, max(ratio, 1.0 / max(1, MOST_STEPS - steps)))


# Names of a residual's parts. Of each parameter AGE is one number, ROWS one sum of squares a row;
# all other parts have the parameter's shape.
AGE: Final = "age"
SECOND_MOMENT: Final = "second_moment"
ROWS: Final = "row_squares"
# The rounding errors of the sums that this rank owns (`ShardExchange`).
OWNER_ERROR: Final = "owner_error"
_HOST: Final = torch.device("cpu")
_PIECE: Final = 1 << 16  # fits a cache


class ResidualSize(NamedTuple):
    """The size of this rank's residual.

    square: the sum of the values' squares; mass: the sum of their absolute values.
    sent_mass: the sum of the absolute values that the last step took out.
    """

    square: float = 0.0
    mass: float = 0.0
    sent_mass: float = 0.0


class Residual:
    """The values that this rank has accumulated and not sent: float32 or float64 [n], on a device.

    The law of every step, coordinate by coordinate and summed over ranks:
    update + residual after = residual before + gradient. The gradient is weighted; with momentum
    correction the velocity takes its place, with Adam's correction Adam's step.

    A step can be undone, also after its update was applied. From `snapshot` to `drop_snapshot`
    changes are written to a second buffer, and the two are swapped:

        snapshot      accumulate            the step counts      or else, restore
        [a]  [ ]      [a] --+ g--> [a']     [ ]  [a']            [a]  [ ]

    masked: whether the velocity of an applied entry is cleared (factor masking).
    betas: of Adam's moments, which gradients go through before they get here; None: they do not.
    sizes: of the parameters, which lie side by side; none: one is the whole vector.
    has_moments: whether gradients go through Adam's moments before they get here.
    shares_second_moment: whether the ranks share a second moment, for which they exchange a sample.
    may_be_misplaced: whether entries may be here that another rank is to go on with
        (`NodeExchange`, `ShardExchange`): the same on all ranks.
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
            Memory.of(torch.zeros(len(sizes), dtype=torch.int64))
            if name == AGE
            else Memory.of(zeros(length, dtype, device))
            for name in self._names
        ]
        # Where parameters begin and end, in a vector and in ROWS.
        self._ends = [*itertools.accumulate(sizes or [length], initial=0)]
        self._row_ends: list[int] = []
        self._on_gpu = is_on_device(self.values)
        self._second_buffers: list[Memory] = []
        self._swapped: set[int] = set()  # parts changed since `snapshot`: old values are beside
        self._betas, self._sizes = betas, sizes
        self.has_moments, self.shares_second_moment = betas is not None, False
        self.threshold = 0.0  # a guess: it decides how fast the selection is, never its result
        self.is_empty = True
        self._drained_steps = 0
        self.may_be_misplaced = True
        # At `snapshot`: is_empty, _drained_steps, may_be_misplaced.
        self._snapshot: tuple[bool, int, bool] | None = None
        # Place in _memory, the parameter's, values; None: none is set aside, on any rank.
        self._stashed: list[tuple[int, int, torch.Tensor]] | None = None
        self._step: Step | None = None  # accumulates and selects on a GPU
        # Picked and returned in the last step; None: it was dense.
        self._last_sent: tuple[SparseVector, SparseVector] | None = None
        self._steps: AdamSteps | None = None

    def hold_adam_moments(self, steps: AdamSteps) -> None:
        """Make room for moments of AdamW, whose steps then come here; before the first one."""
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
        """Read the options, such as the rate, of AdamW's next step."""
        assert self._steps is not None
        self._steps.read(OwnMoments(*(memory.tensor for memory in self._memory[1:5])))

    @property
    def values(self) -> NDArray[Any]:
        """Return the residual's values: [n]."""
        return self._memory[0].array

    @property
    def velocity(self) -> NDArray[Any] | None:
        """Return the velocity, [n], with momentum correction."""
        return self._memory[1].array if self.momentum else None

    @property
    def owner_errors(self) -> NDArray[Any]:
        """Return the rounding errors of the sums that this rank owns: [n]."""
        return self._memory[self._names.index(OWNER_ERROR)].array

    def keep_owner_errors(self, indices: NDArray[Any], values: NDArray[Any]) -> None:
        """Replace the owner errors at these indices."""
        self._writable(self._names.index(OWNER_ERROR)).array[indices] = values

    def state_before(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the optimizer's state of parameters as before a step that may still be undone."""
        return {} if self._steps is None else self._steps.state_before()

    def row_sums(self) -> tuple[float, float]:
        """Return sums of sampled squares of a shared second moment: the mean's and this rank's."""
        assert self._steps is not None
        own = float(self.after_last_step()[ROWS].sum()) / self._steps.share
        return self._steps.square_of_mean(), own

    def arrays(self) -> list[NDArray[Any]]:
        """Return its arrays, to be changed in place: the values first, then the other parts."""
        return [self._writable(number).array for number in range(len(self._memory))]

    def accumulate(self, gradient: NDArray[Any]) -> None:
        """Add a weighted gradient, [n]; with momentum, make it the velocity in place first."""
        total = view_tensor(gradient)
        if self.momentum:
            total.copy_(self._writable(1).tensor.mul_(self.momentum).add_(total))
        self.is_empty, self._drained_steps = False, 0
        self._writable(0).tensor.add_(total)

    def accumulate_and_select(
        self, gradient: Gradient, k: int, weight: float = 1.0, where: slice | None = None
    ) -> SparseVector:
        """Add weight * gradient, in one array or in parts, and return the k largest entries.

        where: the part that the gradient covers and entries are selected from; None: all.
        """
        self.is_empty, self._drained_steps = False, 0
        if where is not None:
            return self._add_to_part(gradient, k, weight, where)
        # The pass writes the sum into the second buffer: no copy is needed.
        into, faster = self._target_buffer(0), self._target_buffer(1) if self.momentum else None
        beside = None if into is None else into.array
        momentum = None
        if self.momentum:
            memory = None if faster is None else faster.array
            momentum = Momentum(self._memory[1].array, self.momentum, memory)
        if self._on_gpu:
            # A Step is of one k: its buffers, and the CUDA graph that it replays, have that size.
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
                self._swap_buffers(number)
        return picked

    def _add_to_part(self, gradient: Gradient, k: int, weight: float, where: slice) -> SparseVector:
        # Copied as a whole first: a pass over a part would leave gaps in the other buffer.
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
        """Remove what was picked, and put back what returned from the reduction.

        With factor masking, the velocity of applied picks is cleared, too: of those that are in the
        update, and of which less than half returned. An index alone does not tell: it may be in the
        update by another rank's pick, while this rank's own was dropped and returned.
        """
        self._last_sent = picked, returned
        here = slice(None) if where is None else where
        values = self._writable(0).array[here]
        # All picks are cleared, and what returned is added: a dropped pick comes back whole, one
        # that was sent leaves its rounding error, and some that return are other ranks' picks.
        clear_at(values, picked.indices)
        add_at(values, returned)
        if self.momentum and self._masked:
            there = picked.where(contains(update.indices, picked.indices))
            applied = abs(values[there.indices]) < abs(there.values) / 2
            clear_at(self._writable(1).array[here], there.indices[applied])

    def add(self, entries: SparseVector) -> None:
        """Add entries of a vector as long as this one."""
        self.is_empty = False
        add_at(self._writable(0).array, entries)

    def add_dense(self, values: torch.Tensor) -> None:
        """Add values: [n]."""
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

    def snapshot(self) -> None:
        """Let `restore` bring back what is here now; the first call makes room for it."""
        self._second_buffers = self._second_buffers or [one.like() for one in self._memory]
        self.drop_snapshot()
        self._snapshot = self.is_empty, self._drained_steps, self.may_be_misplaced

    def restore(self) -> None:
        """Become what it was at the last `snapshot`, to the bit; do nothing without one."""
        if self._snapshot is None:
            return
        # By swapping, not by subtracting what was added: that would round once more.
        for number in tuple(self._swapped):
            self._swap_buffers(number)
        if self._steps is not None:
            self._steps.undo()
        self.is_empty, self._drained_steps, self.may_be_misplaced = self._snapshot
        self._stashed = None
        self.drop_snapshot()

    def drop_snapshot(self) -> None:
        """Drop the snapshot: there is nothing to restore from now on."""
        self._snapshot = None
        self._swapped.clear()
        if self._steps is not None:
            self._steps.drop_snapshot()

    def stash(self, places: Collection[int]) -> None:
        """Keep the residual of some parameters out of a step, from `snapshot` to `unstash`.

        places: theirs among `sizes`; the same on all ranks.
        """
        self._stashed = []
        if self._steps is not None:
            self._steps.exclude(places)
        for number, name in enumerate(self._names):
            if number == 0 and self.is_empty:
                continue
            tensor = self._writable(number).tensor
            for place in places:
                where = self._where(name, place)
                self._stashed.append((number, place, tensor[where].clone()))
                # Ages and row sums are not sent: nothing has to be kept out of the step.
                if name not in (AGE, ROWS):
                    tensor[where] = 0

    def unstash(self) -> None:
        """Put back what was set aside, once the update is applied."""
        if self._stashed is None:
            return
        assert self._snapshot is not None
        places = []
        for number, place, values in self._stashed:
            name = self._names[number]
            here = self._writable(number).tensor[self._where(name, place)]
            if name in (AGE, ROWS):
                here.copy_(values)  # for these parameters the step did not happen
            else:
                here.add_(values)  # entries may have returned from the reduction meanwhile
            if name == AGE:
                places.append(place)
            self.is_empty &= number != 0
        if self._steps is not None:
            self._steps.undo_part(places)
        self.may_be_misplaced |= self._snapshot[2]  # values set aside were not brought home
        self._stashed = None

    @property
    def has_stashed(self) -> bool:
        """Tell whether any value that is not zero is set aside; waits for a GPU."""
        return any(number == 0 and bool(values.any()) for number, _, values in self._stashed or ())

    def _swap_buffers(self, number: int) -> None:
        memory, beside = self._memory, self._second_buffers
        memory[number], beside[number] = beside[number], memory[number]
        self._swapped ^= {number}

    def _target_buffer(self, number: int) -> Memory | None:
        """Return the second buffer to write this part's new values into; None: write in place."""
        if self._snapshot is None or number in self._swapped:
            return None
        return self._second_buffers[number]

    def _writable(self, number: int) -> Memory:
        """Return this part's memory, to be changed in place; copy what a snapshot holds first."""
        into = self._target_buffer(number)
        if into is not None:
            into.tensor.copy_(self._memory[number].tensor)
            self._swap_buffers(number)
        return self._memory[number]

    def after_last_step(self) -> dict[str, torch.Tensor]:
        """Return its parts by name, as they were before a step that may still be undone: [n].

        "residual"; with momentum "velocity"; with Adam's correction its two moments and AGE, [p], a
        number a parameter; where AdamW's steps are made before the exchange ROWS, too, [all rows].
        """
        return {
            name: (self._second_buffers if number in self._swapped else self._memory)[number].tensor
            for number, name in enumerate(self._names)
        }

    def part(self, name: str, place: int) -> torch.Tensor:
        """Return a view of a parameter's part after the last step: [its elements].

        place: the parameter's among `sizes`. AGE is a scalar; ROWS has one value a row.
        """
        number = self._names.index(name)
        memory = self._second_buffers if number in self._swapped else self._memory
        return memory[number].tensor[self._where(name, place)]

    def parts(self, place: int) -> dict[str, torch.Tensor]:
        """Return a `part` of each name."""
        return {name: self.part(name, place) for name in self._names}

    def _where(self, name: str, place: int) -> int | slice:
        """Return where a parameter's part lies in the memory of this name."""
        if name == AGE:
            return place
        ends = self._row_ends if name == ROWS else self._ends
        return slice(ends[place], ends[place + 1])

    def to_adam_step(self, gradient: NDArray[Any], share: float, transport: Transport) -> float:
        """Turn the weighted gradient into Adam's weighted step, in place.

        share: of this rank in the sum. Returns the seconds of exchanging samples for the step.
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
        """Add a fraction of the residual to the weighted gradient, in place, and return it.

        For a step that sends every entry; `drain_fraction` says why not all of the residual goes at
        once. With momentum correction the gradient becomes the velocity first; nothing of it is
        masked: where every entry is sent in every step, none is stale.
        """
        # By torch: CuPy's operators take subnormal float32 for zeros.
        total = view_tensor(gradient)
        if self.momentum:
            total.copy_(self._writable(1).tensor.mul_(self.momentum).add_(total))
        if self.is_empty:
            return 1.0
        here = self._memory[0].tensor
        held, coming = _squares(here, total)
        fraction = drain_fraction(held, coming, self._drained_steps)
        total.add_(here, alpha=fraction)
        return fraction

    def subtract_fraction(self, fraction: float) -> None:
        """Remove this fraction of the residual: it has been sent."""
        self._last_sent = None
        if fraction == 1.0:
            self.clear()
        elif not self.is_empty:
            self._drained_steps += 1
            self._writable(0).tensor.mul_(1.0 - fraction)

    def clear(self) -> None:
        """Empty the residual: all of it has been sent."""
        if not self.is_empty:
            # No copy: a snapshot keeps the old values beside, and the other buffer is zeroed.
            if self._target_buffer(0) is not None:
                self._swap_buffers(0)
            self._memory[0].tensor.zero_()  # by torch, on its current stream
            self.threshold = 0.0
            self.is_empty = True


def _squares(*tensors: torch.Tensor) -> list[float]:
    """Return the sum of squares of each; a GPU is waited for once."""
    if tensors[0].is_cuda:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
        return [norm * norm for norm in torch.stack(norms).tolist()]
    return [float(sum(part.dot(part).double() for part in t.split(_PIECE))) for t in tensors]
