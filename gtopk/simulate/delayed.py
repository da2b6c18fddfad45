"""Delayed rounds in simulated time: the ranks' own state machines, moved by a queue of events."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from collectives.transports import Transport

from ..adaptive.cuts import shuffled
from ..adaptive.round_exchange import RoundExchange
from ..adaptive.rounds import Ready, Reduced, Rounds
from .record import Record
from .setting import Setting

_MOST_EPOCHS: Final = 100  # of samples in one round


class Time:
    """The simulated second."""

    now = 0.0


class Meeting:
    """One thing all ranks do together: it is over some time after the last has come.

    results: of each rank.
    """

    def __init__(self, ranks: int) -> None:
        self.arrived: dict[int, Any] = {}
        self.results: list[Any] = []
        self.over_at = math.inf
        self._ranks = ranks

    @property
    def is_complete(self) -> bool:
        """Tell whether every rank has come."""
        return len(self.arrived) == self._ranks

    def parts(self) -> list[Any]:
        """Return what the ranks came with, in order."""
        return [self.arrived[rank] for rank in range(self._ranks)]


class Seat(NamedTuple):
    """A rank's place in a meeting."""

    meeting: Meeting
    rank: int
    time: Time

    @property
    def done(self) -> bool:
        """Tell whether the meeting is over now."""
        return self.meeting.over_at <= self.time.now

    def wait(self) -> Any:
        """Return the rank's result of what is over."""
        if not self.done:
            raise RuntimeError("a simulated rank must not wait: time would not go on")
        return self.meeting.results[self.rank]


class SimulatedWire:
    """One rank's end of a modelled wire; the reductions on it are real ones.

    Each rank takes part in the meetings of a kind in order, as it would in the engine's.
    """

    def __init__(self, ends: Ends, rank: int) -> None:
        self._ends, self._rank = ends, rank
        self._met = {"ready": 0, "reduce": 0}

    def ready(self, samples: int, is_last: bool) -> Seat:
        """Say that this rank may end the round."""
        return self._meet("ready", (samples, is_last))

    def reduce(self, gradients: list[torch.Tensor | None], samples: int, batches: int) -> Seat:
        """Reduce the sums of a round."""
        return self._meet("reduce", (gradients, samples, batches))

    def _meet(self, kind: str, what: Any) -> Seat:
        meeting = self._ends.meeting(kind, self._met[kind])
        self._met[kind] += 1
        meeting.arrived[self._rank] = what
        if meeting.is_complete:
            self._ends.complete(kind, meeting)
        return Seat(meeting, self._rank, self._ends.time)


class Ends:
    """What lies between the ranks' ends: buckets, residuals, and the meetings that are open.

    models: of the ranks that are here.
    """

    def __init__(
        self, setting: Setting, time: Time, models: Mapping[int, torch.nn.Module], record: Record
    ) -> None:
        self.time = time
        self._setting, self._record = setting, record
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._exchanges = {
            rank: RoundExchange(list(model.parameters()), setting.compression)
            for rank, model in models.items()
        }
        self._ranks = range(setting.cluster.ranks)
        self._reduce_seconds = setting.reduce_seconds

    def meeting(self, kind: str, number: int) -> Meeting:
        """Return a meeting, the same one for every rank."""
        self._meetings.pop((kind, number - 2), None)
        return self._meetings.setdefault((kind, number), Meeting(len(self._ranks)))

    def complete(self, kind: str, meeting: Meeting) -> None:
        """Give a meeting its results and its end."""
        parts = meeting.parts()
        if kind == "ready":
            ready = Ready(sum(n for n, _ in parts), any(is_last for _, is_last in parts))
            meeting.results = [ready] * len(parts)
            meeting.over_at = self.time.now + self._setting.cluster.signal_seconds()
            return
        counts, batches = ([part[place] for part in parts] for place in (1, 2))
        for rank, exchange in self._exchanges.items():
            exchange.take(parts[rank][0])

        def reduce(transport: Transport) -> list[torch.Tensor] | None:
            return self._exchanges[transport.rank].reduce(transport, 1.0 / sum(counts))

        updates = self._setting.ranks.meet(self._ranks, reduce)
        # All ranks get the same update, or none; those elsewhere have no parameters here.
        elsewhere: list[torch.Tensor] | None = None if None in updates.values() else []
        meeting.results = [
            Reduced(updates.get(rank, elsewhere), counts, batches) for rank in self._ranks
        ]
        meeting.over_at = self.time.now + self._reduce_seconds
        self._record.exchange += self._reduce_seconds
        self._record.sizes.append((self.time.now, counts))


def simulate(setting: Setting) -> Record:
    """Train by delayed rounds, and return what happened.

    Micro-batches come from one counter that all ranks share, through all epochs. Every process
    moves all ranks' rounds, and computes the gradients of those that are here.
    Raises ValueError for rounds that go on and on.
    """
    cluster, task, time = setting.cluster, setting.task, Time()
    exchange_seconds = max(setting.reduce_seconds, cluster.signal_seconds())
    epochs = max(setting.global_batch, sum(cluster.speeds) * exchange_seconds) / task.samples
    if epochs > _MOST_EPOCHS:
        raise ValueError(
            f"ranks compute while they exchange, and a round of {setting.global_batch:,} samples "
            f"that takes {exchange_seconds:g} s to exchange would be {epochs:.3g} epochs long, "
            f"where at most {_MOST_EPOCHS} are simulated"
        )
    record = Record("abs", setting.seed, busy=[0.0] * cluster.ranks)
    models = {rank: task.model() for rank in setting.ranks.here}
    ends = Ends(setting, time, models, record)
    claims = claim(task.samples, setting.micro_batch, 1000 * setting.seed)
    noises = cluster.noises(setting.seed)
    processed = 0  # samples of the rounds that are over, on rank 0

    def open_rounds(rank: int) -> Rounds:
        parameters = list(models[rank].parameters()) if rank in models else []
        optimizer = setting.optimizer(parameters) if parameters else None

        def apply(samples: int) -> None:
            if optimizer is not None:
                optimizer.step()
            close(samples)

        def skip(culprits: Sequence[int]) -> None:
            record.skipped += rank == 0
            close(sum(rounds[rank].samples))

        def close(samples: int) -> None:
            nonlocal processed
            if rank == 0:
                processed += samples
                record.steps += 1
                if 0 in models and setting.is_due(processed, len(record.accuracy)):
                    record.accuracy.append((time.now, task.accuracy(models[0])))

        wire = SimulatedWire(ends, rank)
        return Rounds(parameters, wire, rank, cluster.ranks, setting.global_batch, apply, skip)

    rounds = [open_rounds(rank) for rank in range(cluster.ranks)]
    events: list[tuple[float, int, float, list[int]]] = []  # the ends of micro-batches

    def begin(rank: int) -> None:
        indices = next(claims)
        seconds = cluster.compute_seconds(rank, len(indices), time.now, noises[rank])
        heapq.heappush(events, (time.now + seconds, rank, seconds, indices))

    for rank in range(cluster.ranks):
        begin(rank)
    while processed < setting.epochs * task.samples:
        time.now, rank, seconds, indices = heapq.heappop(events)
        if rank in models:
            task.loss(models[rank], torch.tensor(indices)).backward()
        record.busy[rank] += seconds
        record.samples += len(indices)
        rounds[rank].add(len(indices), summed=False)
        rounds[rank].poll()
        begin(rank)
    record.seconds = time.now
    return record


def claim(length: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield micro-batches of one order after another, without end."""
    for epoch in itertools.count():
        order = shuffled(length, seed, epoch)
        for first in range(0, length, size):
            yield order[first : first + size]
