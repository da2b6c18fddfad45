"""Stragglers: compares the ranks' computing speeds; all ranks exchange times every six steps.

    step     1 ... 6 | 7 ... 12 |          seconds from a step's end until this rank was ready for
    scores           m          m          the next exchange; m: the median of its last five

    score = the smallest of all ranks' medians / this rank's

The fastest rank has score 1. A rank with score 0.25 takes four times as long, and the others wait
for it. A separate operation exchanges the times; it waits for nothing and sends no arrays. Programs
that share cores may slow a rank down for a while. So a rank is reported after three low scores in a
row, at most once a minute, and never if its host has more ranks than cores.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from collectives.cores import own_cores, shared_cores
from collectives.transports import Transport

from .run_record import recorder_of

if TYPE_CHECKING:
    from ..runtime.coordinator import Engine, Operation
    from ..runtime.world.membership import World

_log = logging.getLogger("gtopk")
# In steps: longer than a window, so that windows do not overlap.
_EVERY: Final = 6
# In steps: a single one that evaluates or saves does not affect the median.
_WINDOW: Final = 5
# In scores: a rank that slows down is reported within 22 steps.
_LOW_SCORES_TO_WARN: Final = 3
SLOW: Final = 0.25
CAUGHT_UP: Final = 0.5
# Shorter steps are too noisy to compare.
_LEAST_SECONDS: Final = 0.01
QUIET_SECONDS: Final = 60.0  # without another warning of the same rank


class StragglerState(NamedTuple):
    """The state of stragglers after an exchange of flags, equal on all ranks.

    seconds: each rank's median; 0 if it had none.
    slow:    the indices of the ranks that were slow in several scores in a row.
    hosts:   the hosts of all ranks, if `slow` has changed.
    oversubscribed: the hosts with more ranks than cores.
    """

    seconds: list[float]
    slow: list[int]
    hosts: list[str]
    oversubscribed: set[str]

    def scores(self) -> list[float | None]:
        fastest = min((each for each in self.seconds if each), default=0.0)
        return [fastest / each if each else None for each in self.seconds]


class Stragglers:
    """One rank's side of the comparison: call `note` after each step that all ranks take together.

    scores: the latest score of each rank; None before the first.
    """

    def __init__(self, here: World, engine: Engine, name: str) -> None:
        """name: the operation's name, equal on all ranks."""
        self.scores: list[float | None] | None = None
        self._world, self._engine = here, engine
        self._name = f"{name}.speed"
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._operation: Operation | None = None
        # Used by the engine's thread only; equal on all ranks.
        self._slow: list[int] = []
        self._low_scores: Counter[int] = Counter()  # consecutive low scores, by rank index
        self._hosts: list[str] = []
        self._oversubscribed: set[str] = set()
        self._warned: set[int] = set()  # ranks with a warning that have not caught up yet
        self._quiet_until: dict[int, float] = {}

    def note(self, steps: int, seconds: float | None) -> None:
        """Record a step; when due, start the exchange of times.

        steps: the number of steps applied, equal on all ranks.
        seconds: from the end of the previous step until this rank was ready; None if unknown.
        """
        if self._engine.transport.size == 1:
            return
        if seconds is not None:
            self._recent.append(seconds)
        if self._operation is not None and self._operation.done:
            # On an error, because a rank has joined or left, there are no scores.
            if self._operation.error is None:
                self._receive(self._operation.result)
            self._operation = None
        # The condition is equal on all ranks: the last exchange of flags was announced before the
        # exchanges of later steps. Those have ended on every rank, so it has ended, too.
        if steps % _EVERY == 0 and self._operation is None:
            # Sent as flags, in microseconds, within the announcement: no other message is needed.
            median = statistics.median(self._recent) if self._recent else 0.0
            self._operation = self._engine.submit(
                self._name, [], self._new_state, flags=round(1e6 * median)
            )

    def _new_state(self, transport: Transport, all_flags: Sequence[int]) -> StragglerState:
        """Compute the new state on the engine's thread, equal on all ranks."""
        state = StragglerState([flags / 1e6 for flags in all_flags], [], [], set())
        # Hysteresis: slow below a quarter, caught up above half, unchanged in between.
        for place, score in enumerate(state.scores()):
            is_slow = place in self._slow
            if score is not None and is_slow:
                is_slow = score < CAUGHT_UP
            elif score is not None:
                if score <= SLOW and state.seconds[place] >= _LEAST_SECONDS:
                    self._low_scores[place] += 1
                else:
                    self._low_scores[place] = 0
                is_slow = self._low_scores[place] >= _LOW_SCORES_TO_WARN
            if is_slow:
                self._low_scores[place] = 0
                state.slow.append(place)
        # Both lists depend only on all ranks' flags, so all ranks gather here, or none does.
        if state.slow != self._slow:
            reports = transport.gather_object([socket.gethostname(), own_cores()])
            state.hosts.extend(host for host, _ in reports)
            for host, ranks in Counter(state.hosts).items():
                if ranks > shared_cores([cores for other, cores in reports if other == host]):
                    state.oversubscribed.add(host)
        self._slow = state.slow
        return state

    def _receive(self, state: StragglerState) -> None:
        self.scores = state.scores()
        if state.hosts:
            self._hosts, self._oversubscribed = state.hosts, state.oversubscribed
        score = self.scores[self._engine.transport.rank]
        if (recorder := recorder_of(self._world)) is not None and score is not None:
            recorder.note("score", score=score)
        if self._engine.transport.rank == 0:
            self._log_changes(state)

    def _log_changes(self, state: StragglerState) -> None:
        """Warn of slow ranks, and report those that have caught up."""
        ranks, scores, now = self._engine.transport.ranks, state.scores(), time.monotonic()
        fastest = 1e3 * min((each for each in state.seconds if each), default=0.0)

        def details(place: int) -> tuple[int, str, float, float]:
            return ranks[place], self._hosts[place], 1e3 * state.seconds[place], fastest

        for place in state.slow:
            score = scores[place]
            if score is None or place in self._warned or now < self._quiet_until.get(place, now):
                continue
            if self._hosts[place] in self._oversubscribed:
                continue
            self._warned.add(place)
            self._quiet_until[place] = now + QUIET_SECONDS
            _log.warning(
                "rank %d (host %s) computes %.3g ms per step, the fastest rank %.3g ms (%.2g times "
                "slower, at step %d): the others wait for it. Balance the load "
                "(loader = hvd.adapt(loader, optimizer)), or check what else runs there",
                *details(place),
                1 / score,
                self._world.step,
            )
        for place in sorted(self._warned.difference(state.slow)):
            self._warned.remove(place)
            _log.warning(
                "rank %d (host %s) has caught up: it computes %.3g ms per step, the fastest rank "
                "%.3g ms (at step %d)",
                *details(place),
                self._world.step,
            )
