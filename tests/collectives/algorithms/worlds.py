"""Test worlds for the reductions: picks of all ranks, and all variants of the algorithms."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from collectives import ALGORITHMS, SparseVector, reduce, run_ranks, select
from collectives.transports import LocalTransport, Transport, local_world
from collectives.wire import EXACT, INDEX_CODES, VALUE_CODES, Format

Outcome = tuple[SparseVector, SparseVector]  # update, returned

FEW = [-2.0, -1.0, 0.5, 1.0, 2.0]  # ties, and sums that cancel exactly
TRUNCATING = ["gtopk-tree", "gtopk", "oktopk"]  # their updates have at most k entries
MERGING = ["gtopk-tree", "gtopk"]  # these also drop picks on the way
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
truncating_algorithm = pytest.mark.parametrize("algorithm", TRUNCATING)
merging_algorithm = pytest.mark.parametrize("algorithm", MERGING)
every_size = pytest.mark.parametrize("size", range(1, 10))

FORMATS = [Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES]


def by_twos(size: int) -> list[list[int]]:
    """Return nodes of two ranks; with an odd number, the last has one."""
    return [list(range(rank, min(rank + 2, size))) for rank in range(0, size, 2)]


def ragged(size: int) -> list[list[int]]:
    """Return nodes of 2, 3, 4, ... non-adjacent ranks; the last takes the rest."""
    nodes: list[list[int]] = []
    ranks = [*range(0, size, 2), *range(1, size, 2)]
    while len(ranks) > len(nodes) + 4:
        nodes.append(ranks[: len(nodes) + 2])
        ranks = ranks[len(nodes) + 1 :]
    return [*nodes, ranks]


# All variants of all algorithms: the name, and its options from (ranks, k, length).
VARIANTS: dict[str, tuple[str, Callable[[int, int, int], dict[str, Any]]]] = {
    **{name: (name, lambda size, k, length: {}) for name in ALGORITHMS},
    "gtopk growing": ("gtopk", lambda size, k, length: {"growth": 3.0}),
    "gtopk growing little": ("gtopk", lambda size, k, length: {"growth": 1.5}),
    "oktopk wide": ("oktopk", lambda size, k, length: {"k_out": min(length, 4 * k)}),
    "oktopk narrow": ("oktopk", lambda size, k, length: {"k_out": 1}),
    "hierarchical flat": (
        "hierarchical",
        lambda size, k, length: {"nodes": [[rank] for rank in range(size)]},
    ),
    "hierarchical by twos": (
        "hierarchical",
        lambda size, k, length: {"nodes": by_twos(size), "growth": 2.0},
    ),
    "hierarchical ragged": (
        "hierarchical",
        lambda size, k, length: {"nodes": ragged(size)},
    ),
    "hierarchical oktopk": (
        "hierarchical",
        lambda size, k, length: {"nodes": ragged(size), "across": "oktopk"},
    ),
}


def run(
    variant: str,
    picks: Sequence[SparseVector],
    k: int,
    format: Format = EXACT,
    make_world: Callable[[int], list[LocalTransport]] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Return all ranks' outcomes, in rank order."""
    algorithm, usual = VARIANTS[variant]
    options = {**usual(len(picks), k, picks[0].length), **options}
    world = (make_world or local_world)(len(picks))
    return run_ranks(
        world, lambda t: reduce(picks[t.rank], k, t, algorithm, format=format, **options)
    )


def rendezvous_world(size: int) -> list[LocalTransport]:
    """Return a world in which a send completes only when its message is received.

    Long messages over MPI behave like this: waiting for a send before receiving deadlocks.
    """
    world = local_world(size, timeout_seconds=30)
    flying: dict[tuple[int, int, int], deque[threading.Event]] = defaultdict(deque)

    def watch(transport: LocalTransport) -> None:
        send_on, receive_on = transport.send_on, transport.receive_on

        def send(stream: Transport, message: np.ndarray, to: int) -> Callable[[], None]:
            received = threading.Event()
            flying[stream.tag, transport.rank, to].append(received)
            send_on(stream, message, to)

            def finish() -> None:
                assert received.wait(5), f"rank {transport.rank} waits for rank {to} to receive"

            return finish

        def receive(stream: Transport, source: int) -> np.ndarray:
            message = receive_on(stream, source)
            flying[stream.tag, source, transport.rank].popleft().set()
            return message

        transport.send_on, transport.receive_on = send, receive

    for transport in world:
        watch(transport)
    return world


def entries(pairs: Iterable[tuple[int, float]], length: int, dtype: type) -> SparseVector:
    ordered = sorted(pairs)
    indices = np.array([index for index, _ in ordered], np.int32)
    return SparseVector(indices, np.array([value for _, value in ordered], dtype), length)


def pairs_of(vector: SparseVector) -> list[tuple[int, float]]:
    return list(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))


def bits(vector: SparseVector) -> tuple[bytes, bytes]:
    return vector.indices.tobytes(), vector.values.tobytes()


def random_picks(
    random: np.random.Generator, size: int, length: int, k: int, dtype: type = np.float32
) -> list[SparseVector]:
    """Return k picks of each of `size` ranks; other ranks pick about half of the indices too."""
    shared = np.arange(length) < 2 * k
    picks = []
    for _ in range(size):
        dense = random.standard_normal(length).astype(dtype)
        picks.append(select(np.where(shared, 2 * dense, dense), k)[0])
    return picks


def integer_picks(
    random: np.random.Generator, size: int, length: int, k: int, dtype: type = np.float32
) -> list[SparseVector]:
    """Return picks with sums that are exact in float32, in any order."""
    picks = random_picks(random, size, length, k, dtype)
    return [pick._replace(values=np.round(4 * pick.values) + dtype(9)) for pick in picks]


WHERE = [
    "anywhere",
    "one small stretch",
    "own stretch",
    "next rank's stretch",
    "near zero",
    "the same indices",
    "all but one rank in one half",
]


def picks_where(
    where: str, random: np.random.Generator, size: int, length: int, k: int
) -> list[SparseVector]:
    """Return every rank's k picks: normally distributed values; where: the pattern of indices."""
    picks = []
    for rank in range(size):
        indices = {
            "anywhere": lambda: random.choice(length, k, replace=False),
            "one small stretch": lambda: length // 3 + random.choice(3 * k, k, replace=False),
            "own stretch": lambda r=rank: _stretch(random, r, size, length, k),
            "next rank's stretch": lambda r=rank: _stretch(random, (r + 1) % size, size, length, k),
            "near zero": lambda: random.permutation(
                np.unique((length * random.random(20 * k) ** 8).astype(int))
            )[:k],
            "the same indices": lambda: np.arange(k) * (length // k),
            "all but one rank in one half": lambda r=rank: (
                (r > 0) * (length // 2) + random.choice(length // 2, k, replace=False)
            ),
        }[where]()
        values = random.standard_normal(k).astype(np.float32)
        picks.append(SparseVector(np.sort(indices).astype(np.int32), values, length))
    return picks


def _stretch(random: np.random.Generator, part: int, parts: int, length: int, k: int) -> np.ndarray:
    return part * (length // parts) + random.choice(length // parts, k, replace=False)


@st.composite
def worlds(draw: st.DrawFn, dtype: type, most_ranks: int = 17) -> tuple[int, list[SparseVector]]:
    """Return k and every rank's picks, with any overlap, ties, zeros, cancellations, or empty."""
    size = draw(st.integers(1, most_ranks))
    length = draw(st.integers(1, 30))
    k = draw(st.integers(1, length))
    bound, width = (2.0**120, 32) if dtype == np.float32 else (2.0**1000, 64)
    anything = st.floats(-bound, bound, width=width)
    few = st.sampled_from([*FEW, 0.0, -0.0])
    values = draw(st.sampled_from([few, anything, few | anything]))
    lists = st.dictionaries(st.integers(0, length - 1), values, max_size=k)
    return k, [entries(draw(lists).items(), length, dtype) for _ in range(size)]


def assert_nothing_is_lost(
    picks: Sequence[SparseVector], outcomes: Sequence[Outcome], additions: int | None = None
) -> None:
    """Check sum of picks = update + sum of returned at every coordinate, up to rounding errors.

    An update's entry is a sum of at most P picks in P-1 additions in some order. Its error is at
    most (P-1) u sum |pick|, with u half an ulp of 1 (Higham 2002, section 4.2).
    additions: their number, if it exceeds P-1 because returned entries are sums too.
    """
    update = outcomes[0][0]
    dtype = update.values.dtype
    unit = float(np.finfo(dtype).eps) / 2
    additions = len(picks) - 1 if additions is None else additions
    bound = additions * unit / (1 - additions * unit)
    # Halving may underflow.
    smallest = float(np.finfo(dtype).smallest_subnormal) * additions
    by_index: dict[int, list[float]] = {}
    picked: dict[int, list[float]] = {}
    for vector, sign in (
        *((pick, 1) for pick in picks),
        (update, -1),
        *((returned, -1) for _, returned in outcomes),
    ):
        for index, value in pairs_of(vector):
            by_index.setdefault(index, []).append(sign * value)
    for pick in picks:
        for index, value in pairs_of(pick):
            picked.setdefault(index, []).append(abs(value))
    largest = max(map(max, picked.values()), default=0.0)
    for index, terms in by_index.items():
        lost = abs(math.fsum(terms))
        allowed = bound * math.fsum(picked.get(index, [])) + smallest
        assert lost <= allowed, f"coordinate {index} lost {lost}"
        assert dtype == np.float32 or lost <= 1e-12 * largest + smallest


def same_bits(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> bool:
    return [[bits(vector) for vector in outcome] for outcome in outcomes] == [
        [bits(vector) for vector in outcome] for outcome in expected
    ]
