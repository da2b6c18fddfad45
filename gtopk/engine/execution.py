"""Execution: what is run after a cycle, in an order that is equal on all ranks.

    ready        a    b    c    d         a, c, d: dense arrays with one key; b: anything else
    run          a c d     b              a c d reduced as one, then the work of each

What can be reduced as one is, at the place of the first of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.errors import MismatchError
from collectives.transports import Transport

from ..fusion import Dense, Fuser, Layout, Share, bundle, neutral
from .observer import Event, Phase, What
from .operation import Operation, StandIn, Work
from .table import Ready

Notice = Callable[[Event], None]


class Part(NamedTuple):
    """What this rank does of an operation that all ranks run.

    operation: None where this rank has joined and stands in.
    """

    name: str
    votes: list[int]
    dense: Sequence[Dense]
    layouts: Sequence[Layout]
    work: Work
    operation: Operation | None


def part_of(ready: Ready, operation: Operation | None, stand_in: StandIn | None) -> Part:
    """Return what this rank does of an operation; None: it has joined, and did not submit it."""
    layouts = [Layout(*layout) for layout in ready.intention.dense]
    if operation is not None:
        return Part(ready.name, ready.votes, operation.fusion, layouts, operation.work, operation)
    recipe = ready.intention.recipe
    work: Work = _nothing
    if recipe is not None:
        if stand_in is None:
            raise RuntimeError(f"engine.stand_in must be set to stand in for '{ready.name}'")
        work = stand_in(ready.name, recipe)
    return Part(ready.name, ready.votes, list(map(neutral, layouts)), layouts, work, None)


def _nothing(transport: Transport, votes: list[int]) -> None:
    """Do nothing more than was reduced."""


class Step(NamedTuple):
    """What is run at a time: one operation, or the arrays of several that are reduced as one."""

    parts: list[int]  # the operation of each share
    shares: list[Share]


class Execution:
    """Runs operations on a transport.

    settle: sets the outcome of an operation: its result, its error.
    notice: hears of it all, where there is one.
    """

    def __init__(
        self, transport: Transport, settle: Callable[[Operation, Any, BaseException | None], None]
    ) -> None:
        self.transport = transport
        self.settle = settle
        self.notice: Notice | None = None
        self.activity = ""  # what is run now, or failed
        self._fuser = Fuser()

    def run(self, parts: Sequence[Part], fusion_threshold_bytes: int) -> None:
        """Run operations that all ranks run now; settle each.

        Raises what one of them raised that leaves the ranks in different places; those after it are
        not settled then. That all ranks disagree (MismatchError) leaves them in one.
        """
        left = [len(part.dense) for part in parts]  # arrays to be reduced
        begun: set[str] = set()
        for step in steps_of(parts, fusion_threshold_bytes):
            members = [parts[number] for number in dict.fromkeys(step.parts)]
            self.activity = _title(members)
            # A sum that overflows is found by its result; NumPy's warning would name this line.
            quiet = np.errstate(over="ignore", invalid="ignore")
            with self.transport.operation(self.activity), quiet:
                self._begin([part for part in members if part.name not in begun])
                begun.update(part.name for part in members)
                if step.shares:
                    self._reduce(step.shares, members)
                for number in step.parts:
                    left[number] -= 1
                    if left[number] <= 0:
                        self._work(parts[number])
        self.activity = ""

    def _begin(self, members: Sequence[Part]) -> None:
        for part in members:
            if part.operation is not None:
                part.operation.begin()
            self._notice("begin", "execute", [part])

    def _reduce(self, shares: Sequence[Share], members: Sequence[Part]) -> None:
        def notice(phase: Phase, what: What) -> None:
            self._notice(phase, what, members)

        try:
            dense = [share.dense for share in shares]
            self._fuser.reduce(dense, shares[0].layout, self.transport, notice)
        except BaseException as error:
            for part in members:
                self._settle(part, None, error)
            raise
        self._count(members[0])

    def _work(self, part: Part) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = part.work(self.transport, part.votes)
        except MismatchError as disagreement:  # on every rank, which thus completes the operation
            error = disagreement
        except BaseException as raised:
            self._settle(part, None, raised)
            raise
        if self.transport.traffic.sent_messages:
            self._count(part)
        self._notice("end", "execute", [part])
        self._settle(part, result, error)

    def _settle(self, part: Part, result: Any, error: BaseException | None) -> None:
        if part.operation is not None:
            self.settle(part.operation, result, error)

    def _count(self, part: Part) -> None:
        taken = self.transport.traffic.take()
        if part.operation is not None:
            part.operation.traffic.count(taken.sent_bytes, taken.sent_messages)
            part.operation.traffic.count_wait(taken.wait_seconds)

    def _notice(self, phase: Phase, what: What, members: Sequence[Part]) -> None:
        if self.notice is not None:
            now = time.perf_counter()
            for part in members:
                self.notice(Event(phase, what, part.name, now))


def steps_of(parts: Sequence[Part], fusion_threshold_bytes: int) -> list[Step]:
    """Return what is run, one after the other."""
    shares = [
        Share(number, dense, layout)
        for number, part in enumerate(parts)
        for dense, layout in zip(part.dense, part.layouts, strict=True)
    ]
    steps = [
        Step([share.of for share in group], group)
        for group in bundle(shares, fusion_threshold_bytes)
    ]
    steps += [Step([number], []) for number, part in enumerate(parts) if not part.dense]
    return sorted(steps, key=lambda step: step.parts[0])


def _title(members: Sequence[Part]) -> str:
    others = len(members) - 1
    return f"{members[0].name} and {others} more" if others else members[0].name
