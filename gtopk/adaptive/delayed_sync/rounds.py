"""Rounds: delayed synchronous steps, whose batches last until the reduction before is through.

ABS-SGD (Zhou, Chen and Wu 2023, arXiv 2308.15164), as its abstract determines it; x_t are the
parameters in round t, S_t the update that its gradients reduce to:

    compute  |-- round 0 at x_0 --|---- round 1 at x_1 ----|---- round 2 at x_2 ----|
    wire                          |==== reduce S_0 ====|   |== reduce S_1 ==|
    apply                       x_1 = x_0            x_2 = x_1 - S_0          x_3 = x_2 - S_1

In a round a rank adds up the gradients of micro-batches, all at the same parameters. When the next
one will complete its share of the least batch, it says "ready" and goes on computing; when all
ranks have said so, and the reduction before is through, it ends the round after the micro-batch in
hand. So the delay is one round exactly, every replica makes the same steps, and nobody waits.

With one step of delay, gradient descent on a curvature of lambda is stable for lr * lambda below
1 - momentum, where without it would be below 2 (1 + momentum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Pending(Protocol):
    """Something all ranks do together, under way."""

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""

    def wait(self) -> Any:
        """Return the result."""


class Ready(NamedTuple):
    """What all ranks know once each of them was ready."""

    samples: int
    is_last: bool  # a rank has nothing left to compute


class Reduced(NamedTuple):
    """A round's outcome, the same on every rank.

    update: for each parameter, None for one that has a gradient on no rank; None for all where a
        gradient was not finite, or nobody had samples.
    samples, batches: of each rank in that round.
    culprits: the ranks whose gradients were not finite.
    """

    update: Sequence[torch.Tensor | None] | None
    samples: list[int]
    batches: list[int]
    culprits: Sequence[int] = ()


class Wire(Protocol):
    """What the ranks do together; neither call waits."""

    def ready(self, samples: int, is_last: bool) -> Pending:
        """Say that this rank may end the round; the result is Ready."""

    def reduce(self, sums: list[torch.Tensor | None], samples: int, batches: int) -> Pending:
        """Reduce sums over samples to their mean over all ranks' samples; the result is Reduced."""


class Rounds:
    """One rank's rounds.

    least_samples: of all ranks in a round; a rank's share is what it had of the last round known.
    number: of the round that is open; the last round's until `begin`, when it has `ended`.
    ended:  whether a rank had nothing left, and the round is the last until `begin`.
    batches: how many micro-batches each rank has computed since `begin`, as far as is known.
    samples: of each rank in the last round that is known, and was not cut short.
    skipped: rounds that were not applied, for a gradient that was not finite.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        wire: Wire,
        rank: int,
        ranks: int,
        least_samples: int,
        apply: Callable[[int], None],
        skip: Callable[[Sequence[int]], None] = lambda culprits: None,
    ) -> None:
        """apply: steps with what is in the gradients, over so many samples; skip: of a round that
        is not applied, hears whose gradients were not finite.
        """
        self._parameters = list(parameters)
        self._wire = wire
        self._rank = rank
        self._least_samples = least_samples
        self._apply = apply
        self._skip = skip
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._samples = self._batches = self._next = 0
        self._ready: Pending | None = None
        self._reducing: Pending | None = None
        self._is_abandoned = False
        self.number = 0
        self.skipped = 0
        self.ended = False
        self.batches = [0] * ranks
        self.samples = [1] * ranks

    @property
    def is_drained(self) -> bool:
        """Tell whether nothing was computed that is not in the parameters."""
        return self._reducing is None and not self._samples

    @property
    def waits_for(self) -> Pending | None:
        """Return what a rank with nothing to compute has to wait for."""
        under_way = (self._reducing, self._ready)
        return next((each for each in under_way if each is not None and not each.done), None)

    def load(self, number: int, samples: Sequence[int]) -> None:
        """Go on from a round, with what each of as many ranks had in the last one."""
        self.number, self.ended = number, False
        if len(samples) == len(self.samples):
            self.samples = list(samples)

    def begin(self) -> None:
        """Open rounds anew after the last one."""
        self.number += self.ended
        self.ended = False
        self.batches = [0] * len(self.batches)

    def add(self, samples: int, summed: bool, loss_scale: float = 1.0) -> None:
        """Add a micro-batch's gradients, of a mean or a sum over samples; they become None.

        Those of 16 bits are added up in float32: sums over samples outgrow their dtype.
        loss_scale: what they were multiplied with.
        """
        scale = (1 if summed else samples) / loss_scale
        for place, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if gradient.dtype in (torch.float16, torch.bfloat16):
                gradient = gradient.float()
            if (total := self._sums[place]) is None:
                self._sums[place] = gradient.detach().mul_(scale)
            else:
                total.add_(gradient.detach(), alpha=scale)
        self._samples += samples
        self._next = samples  # the next one will be as large, or the epoch ends
        self._batches += 1

    def leave_out(self) -> None:
        """Be done with a micro-batch without its gradients, and without its samples."""
        self._batches += 1

    def abandon(self) -> None:
        """Apply nothing more of what was computed; all ranks do so, and then `finish`."""
        self._is_abandoned = True
        # As sums that are not finite: ranks that have sent theirs need exchange nothing.
        self._sums = [None] * len(self._parameters)
        self._sums[0] = torch.full_like(self._parameters[0], math.nan)

    def finish(self) -> None:
        """Have nothing left to compute: end the last round with all ranks, and apply its update."""
        while not self.ended:
            self.poll(is_last=True)
            if not self.ended and self.waits_for is not None:
                self.waits_for.wait()
        self.drain()

    def poll(self, is_last: bool = False) -> None:
        """Go on as far as nothing has to be waited for; between two micro-batches.

        is_last: this rank has nothing left to compute.
        """
        if self.ended:
            return
        waits = self.waits_for is not None
        if self._reducing is not None and self._reducing.done:
            self._reducing.wait()  # if it has failed, every rank says so, and not who left after it
        if self._ready is None:
            # A round ends in a later call of `poll`: one more micro-batch is sure to be in it.
            promised = self._samples + (0 if is_last else self._next)
            share = self.samples[self._rank] / sum(self.samples)
            if is_last or promised >= share * self._least_samples:
                self._ready = self._wire.ready(promised, is_last)
            return
        if waits:
            return
        ready: Ready = self._ready.wait()
        self._ready = None
        if ready.samples >= self._least_samples or ready.is_last:
            self._end_round()
            self.ended = ready.is_last
            self.number += not ready.is_last
        else:
            self.poll(is_last)

    def _end_round(self) -> None:
        """Apply the round before, and begin to reduce this one."""
        self._finish_reduction()
        self._reducing = self._wire.reduce(self._sums, self._samples, self._batches)
        self._sums = [None] * len(self._parameters)
        self._samples = self._batches = 0

    def _finish_reduction(self) -> None:
        if self._reducing is None:
            return
        reduced: Reduced = self._reducing.wait()
        self._reducing = None
        if self._is_abandoned:
            return
        self.batches = [a + b for a, b in zip(self.batches, reduced.batches, strict=True)]
        total = sum(reduced.samples)
        if total > 0 and not self.ended:
            self.samples = list(reduced.samples)
        if reduced.update is None:
            if total > 0:
                self.skipped += 1
                self._skip(reduced.culprits)
        else:
            for parameter, update in zip(self._parameters, reduced.update, strict=True):
                parameter.grad = None if update is None else update.to(parameter.dtype)
            self._apply(total)
            for parameter in self._parameters:
                parameter.grad = None

    def drain(self) -> None:
        """Apply the last round's update, when it has `ended`; waits for its reduction."""
        self._finish_reduction()
