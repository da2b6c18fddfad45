"""Choice: order the candidates under a budget, the one to use first.

    budget           density of every sparse candidate         the first candidate
    density          that density                              costs the least (see prediction.py)
    bytes_per_step   the largest one whose bytes fit           updates the most coordinates
    seconds          the largest one whose exchange fits       updates the most coordinates

Dense is one of the candidates if it keeps the budget's bytes. A candidate's cost is the time that
it adds to a step. In a training with a known end it also has the steps that its lag adds. If dense
keeps the budget, no candidate that costs more is placed before it. Among about equal costs, the
candidate that updates more coordinates comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ..wire import Format
from .calibration import Calibration
from .network import Network
from .prediction import (
    USUAL_WIDENINGS,
    WITHOUT_END,
    Candidate,
    Prediction,
    Training,
    most_bytes,
    predict,
)

# Without gtopk-tree, which does what gtopk does in twice the rounds.
SPARSE: Final = ("topk-allgather", "gtopk", "oktopk", "hierarchical")
# Entries of the update / those selected, by algorithm; 1 for the others. On a power of two ranks,
# 2 costs gtopk nothing on the wire.
WIDENINGS: Final[Mapping[str, Sequence[float]]] = {
    "gtopk": (1.0, 2.0, 4.0),
    "oktopk": (1.0, 4.0),
    "hierarchical": (USUAL_WIDENINGS["hierarchical"],),
}
LARGEST_DENSITY: Final = 0.5  # beyond it, the indices alone take as much as dense
LEAST_DENSITY: Final = 1e-4  # a budget of time goes no lower: the model would hardly learn
SAME: Final = 1.05  # costs within this factor count as equal


class TooFewBytesError(ValueError):
    """Raised if not even one entry fits a budget's bytes_per_step; `least_bytes` would do."""

    def __init__(self, least_bytes: float, ranks: int, got: float) -> None:
        self.least_bytes = least_bytes
        super().__init__(
            f"bytes_per_step must be at least {math.ceil(least_bytes)} on {ranks} ranks "
            f"(one entry), got {got:g}"
        )


class Budget(NamedTuple):
    """The limit on a step: exactly one of these."""

    density: float | None = None  # share of the elements that a rank selects
    bytes_per_step: float | None = None  # that any rank sends
    seconds: float | None = None  # from the end of the selection to that of the exchange


class Correction(NamedTuple):
    """Measured over predicted seconds, by part."""

    select: float = 1.0
    merge: float = 1.0  # also of encode and decode
    communicate: float = 1.0


NO_CORRECTION: Final = Correction()


def choose(
    length: int,
    calibration: Calibration,
    budget: Budget,
    formats: Sequence[Format],
    corrections: Mapping[str, Correction] | None = None,
    value_bytes: int = 4,
    training: Training = WITHOUT_END,
) -> list[Prediction]:
    """Return the predictions of the candidates, the one to use first.

    length:      elements of the gradient, of `value_bytes` each.
    corrections: by algorithm, from measuring it.
    training:    the training that the reduction is a part of.
    Raises TooFewBytesError if not even one entry fits the bytes. If the time is too short for any
    exchange, the shortest comes first.
    """

    def expected(candidate: Candidate) -> Prediction:
        prediction = predict(candidate, length, calibration.network, calibration.rates, value_bytes)
        return prediction.scaled(*(corrections or {}).get(candidate.algorithm, NO_CORRECTION))

    def most(candidate: Candidate) -> float:
        return most_bytes(candidate, length, calibration.network, value_bytes)

    def fits(candidate: Candidate) -> bool:
        if budget.bytes_per_step is not None:
            return most(candidate) <= budget.bytes_per_step
        return fits_budget(expected(candidate), budget)

    dense = expected(Candidate("dense"))
    one_entry_candidates = [
        Candidate(algorithm, 1.0 / length, format, widening)
        for algorithm in offered(calibration.network)
        for format in formats
        for widenings in [WIDENINGS.get(algorithm, (1.0,))]
        for widening in widenings
        # The update has at most k entries per rank, so a widening of P or more changes nothing.
        if widening == widenings[0] or widening < calibration.network.ranks
    ]
    predictions = [
        expected(replace(candidate, density=density))
        for candidate in one_entry_candidates
        for density in [_density(candidate, length, budget, fits)]
        if density is not None
    ]
    if budget.bytes_per_step is None or fits_budget(dense, budget):
        predictions.append(dense)
    if budget.bytes_per_step is not None and not predictions:
        least = min(map(most, one_entry_candidates))
        raise TooFewBytesError(least, calibration.network.ranks, budget.bytes_per_step)

    def cost(each: Prediction) -> float:
        return training.cost(each.seconds, each.lag_steps)

    least = min(map(cost, predictions))

    def preference(each: Prediction) -> tuple[bool, bool, float, float]:
        # False sorts first, so candidates that cost more than dense come after it.
        costs_more = cost(each) > cost(dense)
        if budget.density is not None:
            is_nearly_cheapest = cost(each) <= SAME * least
            tiebreaker = -each.updated if is_nearly_cheapest else cost(each)
            return costs_more, not is_nearly_cheapest, tiebreaker, cost(each)
        is_within = fits_budget(each, budget)
        return costs_more, not is_within, -each.updated if is_within else cost(each), cost(each)

    return sorted(predictions, key=preference)


def offered(network: Network) -> list[str]:
    """Return the sparse algorithms to consider on a network.

    "hierarchical" only on nodes with the same number of ranks, more than one: the model does not
    cover others.
    """
    nodes, left_over = divmod(network.ranks, network.ranks_per_node)
    is_hierarchy = network.ranks_per_node > 1 and nodes > 1 and not left_over
    return [name for name in SPARSE if name != "hierarchical" or is_hierarchy]


def fits_budget(found: Prediction, budget: Budget) -> bool:
    """Tell whether a candidate keeps the budget; dense keeps any budget of density."""
    if budget.bytes_per_step is not None:
        return found.sent.most_bytes <= budget.bytes_per_step
    if budget.seconds is not None:
        return found.exchange_seconds <= budget.seconds
    return True


def _density(
    candidate: Candidate, length: int, budget: Budget, fits: Callable[[Candidate], bool]
) -> float | None:
    """Return the largest density of a candidate under a budget; None if none fits."""
    if budget.density is not None:
        return budget.density

    def k_fits(k: int) -> bool:
        return fits(replace(candidate, density=k / length))

    least = 1
    if budget.seconds is not None:
        least = min(length, max(1, round(length * LEAST_DENSITY)))
    most = max(least, round(length * LARGEST_DENSITY))
    if not k_fits(least):
        return least / length if budget.seconds is not None else None
    if k_fits(most):
        return most / length
    # Bisect: bytes and seconds grow with k.
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if k_fits(middle) else (least, middle)
    return least / length
