"""Adverse cases: what a selection meets when its guess is wrong, or the values are strange.

Each is one residual, to which zeros are added, and one guess at the threshold that every round
begins with. What is selected is right all the same; what it takes is the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from collectives import SparseVector
from collectives.kernels import host, reference, why_not_compiled

from .gradients import Array
from .measure import Record, records_of, rows_of, run_round
from .methods import FLOOR, Method, floor, torch_topk
from .places import Host, wanted


class Case(NamedTuple):
    """One residual, float32 [n], and a guess at its k-th largest |value|."""

    name: str
    residual: Array
    guess: float


def cases(length: int, k: int) -> Iterator[Case]:
    """Make one case after the other."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(length, np.float32)
    at_k = float(np.partition(np.abs(normal), length - k)[length - k])
    yield Case("normal values, guess 2 times too high", normal, 2 * at_k)
    yield Case("normal values, guess 1e30", normal, 1e30)
    yield Case("all equal, half of it for a guess", np.ones(length, np.float32), 0.5)
    few = np.zeros(length, np.float32)
    few[random.choice(length, k // 2, replace=False)] = 1
    yield Case("fewer than k that are not zero", few, 0.5)
    normal[random.random(length) < 0.1] = np.nan
    yield Case("10 % NaN", normal, at_k)
    ascending = np.linspace(0, 1, length, dtype=np.float32)
    yield Case("ascending, half the guess", ascending, 0.5)
    yield Case("ascending, no guess", ascending, 0.0)


def _guided(twin: object, guess: float, residual: Array, gradient: Array, k: int) -> SparseVector:
    picked: SparseVector
    picked, _ = twin.accumulate_and_select(  # type: ignore[attr-defined]
        residual, gradient, k, guess
    )
    twin.clear_at(residual, picked.indices)  # type: ignore[attr-defined]
    return picked


def _methods(guess: float) -> list[Method]:
    twins = {} if why_not_compiled() else {"gtopk-compiled": host}
    twins["gtopk-reference"] = reference
    ours = [Method(name, partial(_guided, twin, guess)) for name, twin in twins.items()]
    return [Method(FLOOR, floor), *ours, Method("torch.topk", torch_topk)]


def measure_cases(
    length: int,
    density: float,
    device: str,
    words: Sequence[str] | None,
    rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[Record]]:
    """Time those of our twins and torch.topk that are among the words, or all, case by case."""
    k = max(2, round(length * density))
    nothing = np.full(length, 1, np.float32)
    nothing[:] = 0  # memory of its own: pages of fresh zeros would all be one
    for case in cases(length, k):
        place = Host(device, _methods(case.guess))
        rows = rows_of({place: wanted(place.names, words)})
        for number in range(rounds + 2):
            progress(f"{case.name}: round {number - 1} of {rounds}")
            run_round(rows, case.residual, nothing, k, note=number >= 2)
        yield records_of(rows, f"{case.name} (synthetic)", length, k, density)
