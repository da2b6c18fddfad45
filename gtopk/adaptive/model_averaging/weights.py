"""Merge weights: the weight of each replica in a merge; they sum to one.

If the learning rate follows the batch size, each update makes progress in proportion to its
samples, so replicas are weighted by updates; otherwise they are weighted by samples.

Report: a rank's work since the last merge, which is sent to all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

SMALL_NORM: Final = 0.1  # |w|_2 / n of every replica, below which the perturbation is applied


class Report(NamedTuple):
    """A rank's work since the last merge.

    size: samples in its batches.
    norm: |w|_2 / n of its n parameters.
    finite: whether these are finite; if not, the rank takes the others' model, and its work is
    lost.
    takes: the positions, in the stretch, of the samples that the rank has finished.
    """

    size: int
    updates: int
    samples: int
    norm: float = 0.0
    finite: bool = True
    takes: Sequence[range] = ()


def update_weights(reports: Sequence[Report]) -> list[float]:
    """Return the shares of the updates; a rank without updates counts as if it had made one."""
    return shares([max(report.updates, 1) for report in reports])


def sample_weights(reports: Sequence[Report]) -> list[float]:
    """Return the shares of the samples; a rank without samples counts as if it had one batch."""
    return shares([report.samples or report.size for report in reports])


def published_weights(reports: Sequence[Report]) -> list[float]:
    """Return the shares of the updates, or of the sizes if all made equally many updates.

    Ma, Rusu, Wu and Sim 2021 (arXiv 2110.07029), algorithm 2, as far as it is known here.
    """
    if len({report.updates for report in reports}) == 1:
        return shares([report.size for report in reports])
    return update_weights(reports)


def equal_weights(reports: Sequence[Report]) -> list[float]:
    """Return the same weight for every rank."""
    return [1.0 / len(reports)] * len(reports)


def perturb_weights(
    weights: Sequence[float], reports: Sequence[Report], perturbation: float
) -> list[float]:
    """Return weights raised for the rank with the most updates and lowered for that with fewest.

    Weights change only if every replica's norm is small and the update counts differ. In the
    published form the weights then sum to more than one, which inflates the model with every merge;
    here they are divided by their sum.
    """
    updates = [report.updates for report in reports]
    is_small = all(report.norm < SMALL_NORM for report in reports)
    if not perturbation or not is_small or max(updates) == min(updates):
        return list(weights)
    perturbed = list(weights)
    perturbed[updates.index(max(updates))] *= 1 + perturbation
    perturbed[updates.index(min(updates))] *= 1 - perturbation
    return shares(perturbed)


def shares(counts: Sequence[float]) -> list[float]:
    """Return each count's share of their sum."""
    total = math.fsum(counts)
    return [count / total for count in counts]


WEIGHTS: Final[Mapping[str, Callable[[Sequence[Report]], list[float]]]] = {
    "updates": update_weights,
    "samples": sample_weights,
    "published": published_weights,
    "equal": equal_weights,
}
