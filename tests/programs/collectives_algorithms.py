"""Run on any number of ranks: the reductions give what they give in threads.

Argument: the transport.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from collectives_job import job

from collectives import ALGORITHMS, SparseVector, open_transport, reduce, run_ranks, select
from collectives.transports import local_world

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


def picks_of(length: int, count: int, dtype: type) -> list[SparseVector]:
    """Return every rank's picks; they overlap, and hold ties. Every rank knows them all."""
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


def check(algorithm: str, length: int, k: int, count: int, dtype: type) -> None:
    picks = picks_of(length, count, dtype)
    TRANSPORT.traffic.take()
    update, returned = reduce(picks[RANK], k, TRANSPORT, algorithm)
    counted = TRANSPORT.traffic.take()

    # Agreement.
    digest = hashlib.sha256(update.indices.tobytes() + update.values.tobytes()).digest()
    digests = TRANSPORT.allgather(np.frombuffer(digest, np.uint8))
    assert {d.tobytes() for d in digests} == {digest}

    # Conservation.
    after = [update.to_dense(), *(vector.to_dense() for vector in gathered(returned))]
    before = [pick.to_dense() for pick in picks]
    bound = (SIZE - 1) * float(np.finfo(dtype).eps) * np.abs(before).sum(axis=0, dtype=float)
    lost = np.sum(before, axis=0, dtype=float) - np.sum(after, axis=0, dtype=float)
    assert (np.abs(lost) <= bound + 1e-15).all()

    # What threads get. A library's own allreduce may add in another order, and is reckoned.
    world = local_world(SIZE)
    threads = run_ranks(world, lambda t: reduce(picks[t.rank], k, t, algorithm))
    expected_update, expected_returned = threads[RANK]
    assert same(returned, expected_returned)
    if algorithm == "dense":
        difference = update.to_dense() - expected_update.to_dense()
        assert (np.abs(difference) <= bound + 1e-15).all()
    else:
        assert same(update, expected_update)
        assert counted == world[RANK].traffic


if __name__ == "__main__":
    with job(TRANSPORT):
        for algorithm in ALGORITHMS:
            for case in CASES:
                check(algorithm, *case)
    print(f"rank {RANK} of {SIZE}: nothing is lost\n", end="", flush=True)
