"""Merge weights: how much each replica counts when replicas become one model. They sum to one.

Where the learning rate follows the batch, a replica has come as far as it has seen samples with
every update of its own: updates are the weight. Where it does not, samples are.

A rank's Report tells all ranks what it has done since the last merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from collectives.vector import Array

SMALL_NORM: Final = 0.1  # |w|_2 / n of every replica, below which the perturbation is applied


class Report(NamedTuple):
    """A rank's work since the last merge.

    size: of its batches.
    norm: |w|_2 / n of its n parameters.
    finite: whether they are; else it takes the others' model, and what it did is lost.
    takes: the positions, in the stretch, of the samples it has finished.
    """

    size: int
    updates: int
    samples: int
    norm: float = 0.0
    finite: bool = True
    takes: Sequence[range] = ()


def by_updates(reports: Sequence[Report]) -> list[float]:
    """Return the shares of the updates; a rank that made none counts as if it had made one."""
    return shares([max(report.updates, 1) for report in reports])


def by_samples(reports: Sequence[Report]) -> list[float]:
    """Return the shares of the samples; a rank that had none counts as if it had one batch."""
    return shares([report.samples or report.size for report in reports])


def published(reports: Sequence[Report]) -> list[float]:
    """Return the shares of the updates; of the sizes, where all made as many updates.

    Ma, Rusu, Wu and Sim 2021 (arXiv 2110.07029), algorithm 2, as far as it is known here.
    """
    if len({report.updates for report in reports}) == 1:
        return shares([report.size for report in reports])
    return by_updates(reports)


def equally(reports: Sequence[Report]) -> list[float]:
    """Return the same weight for all."""
    return [1.0 / len(reports)] * len(reports)


def perturbed(
    weights: Sequence[float], reports: Sequence[Report], perturbation: float
) -> list[float]:
    """Return weights that lean to the rank of the most updates, off that of the fewest.

    Only while every replica's norm is small, and only where counts differ. The published form lets
    the weights sum to more than one, and so inflates the model with every merge: here they are
    divided by their sum.
    """
    updates = [report.updates for report in reports]
    is_small = all(report.norm < SMALL_NORM for report in reports)
    if not perturbation or not is_small or max(updates) == min(updates):
        return list(weights)
    leaning = list(weights)
    leaning[updates.index(max(updates))] *= 1 + perturbation
    leaning[updates.index(min(updates))] *= 1 - perturbation
    return shares(leaning)


def shares(counts: Sequence[float]) -> list[float]:
    """Return each count's share of their sum."""
    total = math.fsum(counts)
    return [count / total for count in counts]


WEIGHTS: Final[Mapping[str, Callable[[Sequence[Report]], list[float]]]] = {
    "updates": by_updates,
    "samples": by_samples,
    "published": published,
    "equal": equally,
}


def encode(report: Report, count: int) -> Array:
    """Return a report, and how far its rank has seen the cursor, as a message."""
    numbers = [report.size, report.updates, report.samples, report.finite, count]
    takes = [bound for take in report.takes for bound in (take.start, take.stop)]
    head = np.array([report.norm]).view(np.int64)
    return np.concatenate([head, np.array([*numbers, *takes], np.int64)]).view(np.uint8)


def decode(message: Array) -> tuple[Report, int]:
    """Return what `encode` made a message of."""
    numbers = message.view(np.int64)
    norm = float(numbers[:1].view(np.float64)[0])
    size, updates, samples, finite, count, *bounds = numbers[1:].tolist()
    takes = [range(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
    return Report(size, updates, samples, norm, bool(finite), takes), count
