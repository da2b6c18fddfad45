"""Record: what a simulated training run was, second by simulated second."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Record:
    """One mode and seed.

    seconds:   simulated, of the whole run.
    busy:      of these, what each rank computed.
    exchange:  of these, what the wire was in use, as modelled; of synchronous modes, what ranks
               waited for it.
    samples:   computed, of all ranks.
    steps:     updates of the parameters; of replicas, those of the rank that makes most.
    skipped:   how often what was computed was left out, as it was not finite: an update, which
               counts as a step all the same, or what a replica brought to a merge.
    accuracy:  (simulated seconds, share of the test samples) after every epoch, or more often.
    sizes:     (simulated seconds, samples of each rank in the step that ended then); 0 of the dead.
    updates:   of each rank, between two merges of replicas, or in an epoch of hogbatch.
    loss:      (simulated seconds, mean loss of the training samples) after every epoch, if known.
    staleness: of hogbatch: others' updates between an update's reading of the model and itself.
    used:      of hogbatch: the share of what each class can compute that it did.
    """

    mode: str
    seed: int
    seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    exchange: float = 0.0
    samples: int = 0
    steps: int = 0
    skipped: int = 0
    accuracy: list[tuple[float, float]] = field(default_factory=list)
    sizes: list[tuple[float, list[int]]] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    loss: list[tuple[float, float]] = field(default_factory=list)
    staleness: float = 0.0
    used: dict[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Return the simulated throughput."""
        return self.samples / self.seconds

    @property
    def utilisation(self) -> float:
        """Return the mean share of time that ranks computed."""
        return statistics.fmean(self.busy) / self.seconds

    @property
    def least_utilisation(self) -> float:
        """Return the least share that a rank computed, of the time it was not on the wire.

        Of a delayed mode, of the whole time: there the wire is no excuse.
        """
        hidden = self.mode == "abs"
        return min(self.busy) / (self.seconds - (0.0 if hidden else self.exchange))

    @property
    def final_accuracy(self) -> float:
        """Return the accuracy after the last epoch."""
        return self.accuracy[-1][1]

    def seconds_to(self, accuracy: float) -> float | None:
        """Return when an accuracy was first reached; None: never."""
        return next((second for second, reached in self.accuracy if reached >= accuracy), None)

    def seconds_to_loss(self, loss: float) -> float | None:
        """Return when a loss was first reached; None: never."""
        return next((second for second, reached in self.loss if reached <= loss), None)
