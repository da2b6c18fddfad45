"""Delayed rounds in simulated time: the library's passes and rounds, driven by an event queue.

epoch     |==== pass 0 ====|== pass 1 ==|= pass 2 =|     dealt by speed, as in mode "abs"
rank 0    [b][b][b][b][b]..|[b][b][b]...|[b]......|      ..: no batches left or the pass is over;
rank 1    [  b  ][  b  ]...|[  b  ].....|[  b  ]..|          the rank waits for the updates
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from collectives.transports import Transport

from ...adaptive.delayed_sync.rounds import Pending, RoundReduction, Rounds
from ...adaptive.partitioning.cuts import Passes, shuffled
from ...adaptive.replica import RoundExchange
from .setting import Record, Setting


@dataclass
class Collective:
    """A collective of all ranks, which ends some time after the last one has arrived.

    arrived: the contribution of each rank that has arrived. results: by rank.
    """

    arrived: dict[int, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    over_at: float = math.inf


class Handle(NamedTuple):
    """A rank's handle of a collective."""

    collective: Collective
    rank: int
    network: SimulatedNetwork

    @property
    def done(self) -> bool:
        """Tell whether the collective is over now."""
        return self.collective.over_at <= self.network.now

    def wait(self) -> Any:
        """Return this rank's result; raise RuntimeError unless the collective is over."""
        if not self.done:
            raise RuntimeError("a simulated rank must not block: simulated time would stop")
        return self.collective.results[self.rank]


class SimulatedWire:
    """One rank's end of a wire with modelled times and real reductions.

    Each rank joins the collectives of a kind in order, as in the engine.
    """

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self._network, self._rank = network, rank
        self._numbers = {"ready": 0, "reduce": 0, "pass": 0}

    def ready(self, is_last: bool) -> Handle:
        """Announce that this rank is ready to end the round."""
        return self._join("ready", is_last)

    def reduce(self, gradients: list[torch.Tensor | None], samples: int, batches: int) -> Handle:
        """Reduce the sums of a round."""
        return self._join("reduce", (gradients, samples, batches))

    def barrier(self) -> Handle:
        """Wait for all ranks between two passes."""
        return self._join("pass", None)

    def _join(self, kind: str, contribution: Any) -> Handle:
        collective = self._network.collective(kind, self._numbers[kind])
        self._numbers[kind] += 1
        collective.arrived[self._rank] = contribution
        self._network.complete(kind, collective)
        return Handle(collective, self._rank, self._network)


class SimulatedNetwork:
    """The exchange between ranks: buckets, residuals and open collectives.

    models: of the ranks in this process, by rank.
    now: the simulated second.
    """

    def __init__(
        self, setting: Setting, models: Mapping[int, torch.nn.Module], record: Record
    ) -> None:
        self.now = 0.0
        self._setting, self._record = setting, record
        self._collectives: dict[tuple[str, int], Collective] = {}
        self._exchanges = {
            rank: RoundExchange(list(model.parameters()), setting.compression)
            for rank, model in models.items()
        }
        self._ranks = range(setting.cluster.ranks)
        self._reduce_seconds = setting.reduce_seconds

    def collective(self, kind: str, number: int) -> Collective:
        # A rank in this collective has left collective number - 2, which no rank will read again.
        self._collectives.pop((kind, number - 2), None)
        return self._collectives.setdefault((kind, number), Collective())

    def complete(self, kind: str, collective: Collective) -> None:
        """Set the results and the end of a collective once all ranks have arrived."""
        if len(collective.arrived) < len(self._ranks):
            return
        parts = [collective.arrived[rank] for rank in self._ranks]
        # A collective costs a message to all ranks, even without gradients.
        collective.over_at = self.now + self._setting.cluster.signal_seconds()
        if kind == "pass":
            collective.results = parts
            return
        if kind == "ready":
            collective.results = [any(parts)] * len(parts)
            return
        counts, batches = ([part[place] for part in parts] for place in (1, 2))
        if not any(counts):
            collective.results = [RoundReduction(None, counts, batches)] * len(parts)
            return
        for rank, exchange in self._exchanges.items():
            exchange.capture_sums(parts[rank][0])

        def reduce(transport: Transport) -> list[torch.Tensor] | None:
            return self._exchanges[transport.rank].reduce(transport, 1.0 / sum(counts))

        updates = self._setting.ranks.run_on(self._ranks, reduce)
        # All ranks get the same update, or none; ranks in other processes have no parameters here.
        remote_update: list[torch.Tensor] | None = None if None in updates.values() else []
        collective.results = [
            RoundReduction(updates.get(rank, remote_update), counts, batches)
            for rank in self._ranks
        ]
        collective.over_at = self.now + self._reduce_seconds
        self._record.exchange += self._reduce_seconds
        self._record.sizes.append((self.now, counts))


class SimulatedRank:
    """A rank in mode "abs": does the work of `DelayedLoader` and of the script's loop."""

    def __init__(
        self,
        rank: int,
        setting: Setting,
        network: SimulatedNetwork,
        model: torch.nn.Module | None,
        record: Record,
    ) -> None:
        """model: None if another process has it."""
        self._rank, self._setting, self._model, self._record = rank, setting, model, record
        self._network = network
        self._noise = setting.cluster.noises(setting.seed)[rank]
        self._wire = SimulatedWire(network, rank)
        self._passes = Passes(setting.cluster.ranks, setting.micro_batch)
        parameters = list(model.parameters()) if model is not None else []
        self._optimizer = setting.optimizer(parameters) if parameters else None
        self._rounds = Rounds(
            parameters,
            self._wire,
            rank,
            setting.cluster.ranks,
            setting.global_batch,
            self._apply,
            self._skip,
        )
        self._processed = 0  # samples in finished rounds

    def train(self) -> Iterator[float | Pending]:
        """Train; yield the seconds of each micro-batch, and the collectives to wait for."""
        samples = self._setting.task.samples
        for epoch in range(self._setting.epochs):
            # All modes use this order of the samples for a seed and epoch.
            order = shuffled(samples, 1000 * self._setting.seed, epoch)
            self._passes.begin([range(samples)])
            yield self._wire.barrier()
            while self._passes.left:
                yield from self._pass(order)
                yield self._wire.barrier()

    def _pass(self, order: Sequence[int]) -> Iterator[float | Pending]:
        rounds = self._rounds
        micro_batches = self._passes.begin_pass(self._rank)
        rounds.begin()
        for places in micro_batches:
            yield from self._compute([order[place] for place in places])
            if rounds.ended:
                break
        while not rounds.ended:
            rounds.poll(is_last=True)
            if not rounds.ended and (pending := rounds.waits_for) is not None:
                yield pending
        if (reducing := rounds.waits_for) is not None:
            yield reducing
        rounds.drain()
        self._passes.close(rounds.batches)

    def _compute(self, indices: list[int]) -> Iterator[float]:
        """Yield a micro-batch's seconds, then add its gradients to the round."""
        cluster, task = self._setting.cluster, self._setting.task
        seconds = cluster.compute_seconds(self._rank, len(indices), self._network.now, self._noise)
        yield seconds
        if self._model is not None:
            task.loss(self._model, torch.tensor(indices)).backward()
        self._record.busy[self._rank] += seconds
        self._record.samples += len(indices)
        self._rounds.add(len(indices), summed=False)
        self._rounds.poll()

    def _apply(self, samples: int) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        self._close(samples)

    def _skip(self, culprits: Sequence[int]) -> None:
        self._record.skipped += self._rank == 0
        self._close(sum(self._rounds.samples))

    def _close(self, samples: int) -> None:
        # Rounds are the same on all ranks; only rank 0 records them.
        if self._rank:
            return
        record, task = self._record, self._setting.task
        self._processed += samples
        record.steps += 1
        due = self._setting.is_due(self._processed, len(record.accuracy))
        if self._model is not None and due:
            record.accuracy.append((self._network.now, task.accuracy(self._model)))


def simulate(setting: Setting) -> Record:
    """Train with delayed rounds, and return the record.

    Every process simulates the rounds of all ranks, but computes only its own ranks' gradients.
    """
    cluster = setting.cluster
    record = Record("abs", setting.seed, busy=[0.0] * cluster.ranks)
    models = {rank: setting.task.model() for rank in setting.ranks.here}
    network = SimulatedNetwork(setting, models, record)
    ranks = [
        SimulatedRank(rank, setting, network, models.get(rank), record)
        for rank in range(cluster.ranks)
    ]
    run([rank.train() for rank in ranks], network)
    record.seconds = network.now
    return record


def run(programs: Sequence[Iterator[float | Pending]], network: SimulatedNetwork) -> None:
    """Run all ranks' programs; resume each when its yielded seconds or collective are over."""
    # Order equal times by rank, so that every process simulates the ranks in the same order.
    due = [(network.now, rank) for rank in range(len(programs))]
    waiting: dict[int, Handle] = {}
    while due:
        network.now, rank = heapq.heappop(due)
        wait = next(programs[rank], None)
        if isinstance(wait, Handle):
            waiting[rank] = wait
        elif isinstance(wait, float):
            heapq.heappush(due, (network.now + wait, rank))
        # The program that just ran may have completed a collective that others wait for.
        for other, handle in list(waiting.items()):
            if handle.collective.over_at < math.inf:
                del waiting[other]
                heapq.heappush(due, (handle.collective.over_at, other))
