"""Run on any number of ranks: reductions give the same results as in threads.

Argument: the transport.
"""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from collectives_job import job

from collectives import (
    ALGORITHMS,
    NonFiniteError,
    SparseVector,
    open_transport,
    reduce,
    run_ranks,
    select,
)
from collectives.algorithms import Hierarchy
from collectives.transports import local_world
from collectives.wire import EXACT, Format

TRANSPORT = open_transport(sys.argv[1], timeout_seconds=60)
RANK, SIZE = TRANSPORT.rank, TRANSPORT.size
CASES = [  # length, k, entries picked, dtype
    (1, 1, 1, np.float32),
    (50, 1, 1, np.float32),
    (50, 7, 7, np.float64),
    (50, 50, 50, np.float32),
    (50, 9, 0, np.float32),
    (100_000, 1000, 1000, np.float32),
    (100_000, 1000, 300, np.float64),
]
NODES = [list(range(0, SIZE, 2)), list(range(1, SIZE, 2))]  # ranks of a host, if it were two
WAYS: list[tuple[str, Format, dict[str, Any]]] = [
    *((algorithm, EXACT, {}) for algorithm in ALGORITHMS),
    ("gtopk", Format("packed", "int8"), {"growth": 2.0}),
    ("gtopk-tree", Format("blocks", "bf16"), {}),
    ("topk-allgather", Format("blocks", "fp16"), {}),
    ("gtopk", Format("blocks", "int3"), {}),
    ("oktopk", Format("packed", "int8"), {"k_out": 1}),
    ("hierarchical", Format("raw", "bf16"), {"nodes": NODES}),
    ("hierarchical", EXACT, {"nodes": NODES, "across": "oktopk"}),
]


def picks_of(length: int, count: int, dtype: type) -> list[SparseVector]:
    """Return every rank's picks, with overlaps and ties; equal on every rank."""
    random = np.random.default_rng([length, count])
    shared = np.arange(length) < 2 * count
    picks = []
    for _ in range(SIZE):
        dense = np.round(random.standard_normal(length), 1) * (1 + shared)
        largest, _ = select(dense.astype(dtype), max(count, 1))
        picks.append(largest if count else SparseVector.empty(length, dtype))
    return picks


def gathered(vector: SparseVector) -> list[SparseVector]:
    """Return every rank's vector."""
    return [
        SparseVector(
            np.frombuffer(indices.tobytes(), vector.indices.dtype),
            np.frombuffer(values.tobytes(), vector.values.dtype),
            vector.length,
        )
        for indices, values in zip(
            TRANSPORT.allgather(vector.indices.view(np.uint8)),
            TRANSPORT.allgather(vector.values.view(np.uint8)),
            strict=True,
        )
    ]


def same(a: SparseVector, b: SparseVector) -> bool:
    return a.indices.tobytes() == b.indices.tobytes() and a.values.tobytes() == b.values.tobytes()


def check(
    way: tuple[str, Format, dict[str, Any]], length: int, k: int, count: int, dtype: type
) -> None:
    algorithm, format, options = way
    picks = picks_of(length, count, dtype)
    TRANSPORT.traffic.read_and_reset()
    update, returned = reduce(picks[RANK], k, TRANSPORT, algorithm, format=format, **options)
    counted = TRANSPORT.traffic.read_and_reset()

    # Agreement.
    digest = hashlib.sha256(update.indices.tobytes() + update.values.tobytes()).digest()
    digests = TRANSPORT.allgather(np.frombuffer(digest, np.uint8))
    assert {d.tobytes() for d in digests} == {digest}

    # Conservation.
    after = [update.to_dense(), *(vector.to_dense() for vector in gathered(returned))]
    before = [pick.to_dense() for pick in picks]
    bound = 4 * SIZE * float(np.finfo(dtype).eps) * np.abs(before).sum(axis=0, dtype=float)
    lost = np.sum(before, axis=0, dtype=float) - np.sum(after, axis=0, dtype=float)
    assert (np.abs(lost) <= bound + 1e-15).all()

    # The result in threads. A library's own allreduce may add in another order; its bytes are
    # estimated.
    world = local_world(SIZE)
    threads = run_ranks(
        world, lambda t: reduce(picks[t.rank], k, t, algorithm, format=format, **options)
    )
    expected_update, expected_returned = threads[RANK]
    assert same(returned, expected_returned)
    if algorithm == "dense":
        difference = update.to_dense() - expected_update.to_dense()
        assert (np.abs(difference) <= bound + 1e-15).all()
    else:
        assert same(update, expected_update)
        assert counted == world[RANK].traffic


def check_that_all_refuse_alike(way: tuple[str, Format, dict[str, Any]]) -> None:
    algorithm, format, options = way
    pick = picks_of(50, 7, np.float32)[RANK]
    if RANK == SIZE - 1:
        pick = pick._replace(values=np.full_like(pick.values, np.nan))
    with pytest.raises(NonFiniteError) as caught:
        reduce(pick, 7, TRANSPORT, algorithm, format=format, **options)
    assert caught.value.rank == SIZE - 1


def check_many_at_once() -> None:
    """Reduce on several channels at the same time, each in its own thread."""
    ways = [way for way in WAYS if way[0] != "dense"]  # a library's own may have no channels
    picks = picks_of(20_000, 300, np.float64)

    def one(number: int) -> SparseVector:
        algorithm, format, options = ways[number]
        channel = TRANSPORT.channel(number)
        return reduce(picks[RANK], 300, channel, algorithm, format=format, **options)[0]

    alone = [one(number) for number in range(len(ways))]
    with ThreadPoolExecutor(len(ways)) as threads:
        together = list(threads.map(one, range(len(ways))))
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))


def check_dense_gradients() -> None:
    """Take a step of `Hierarchy`, which sums whole numbers: nothing is rounded."""
    gradients = np.round(9 * np.random.default_rng(SIZE).standard_normal((SIZE, 1000)))
    hierarchy = Hierarchy(TRANSPORT, [node for node in NODES if node])
    residual = hierarchy.scatter(gradients[RANK].copy()).copy()
    picked = SparseVector.empty(residual.size, residual.dtype)
    if residual.size:
        picked, _ = select(residual, hierarchy.shard_k(60))
    update, returned = hierarchy.reduce(picked, 60, 1000)
    residual[picked.indices] = 0
    residual[returned.indices] += returned.values
    held = np.zeros(1000)
    held[hierarchy.shard(1000)] = residual
    TRANSPORT.allreduce(held)
    assert (update.to_dense() + held).tolist() == gradients.sum(axis=0).tolist()


if __name__ == "__main__":
    with job(TRANSPORT):
        for way in WAYS:
            for case in CASES:
                check(way, *case)
            check_that_all_refuse_alike(way)
        check_many_at_once()
        check_dense_gradients()
    print(f"rank {RANK} of {SIZE}: nothing is lost\n", end="", flush=True)
