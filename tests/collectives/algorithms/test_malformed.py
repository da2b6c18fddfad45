"""Bad arguments, disagreeing ranks and damaged messages are refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from collectives import ALGORITHMS, MessageError, SparseVector, reduce, run_ranks
from collectives.transports import LocalTransport, Traffic, local_world
from collectives.wire import encode
from tests.collectives.algorithms.worlds import (
    TRUNCATING,
    entries,
    every_algorithm,
    merging_algorithm,
    run,
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"algorithm": "ring"},
            "must be one of dense, topk-allgather, gtopk-tree, gtopk, oktopk, hierarchical; got",
        ),
        ({"k": 0}, "k must lie in 1..5 (the vector's length), got 0"),
        ({"k": 6}, "k must lie in 1..5 (the vector's length), got 6"),
        ({"k": -1}, "k must lie in 1..5 (the vector's length), got -1"),
        ({"k": 1}, "at most k = 1 entries may be selected, got 2"),
        (
            {"selected": SparseVector(np.array([1]), np.ones(1, np.float32), 5)},
            "must be int32, got int64",
        ),
        (
            {"selected": SparseVector(np.array([4, 1], np.int32), np.ones(2, np.float32), 5)},
            "strictly increasing, got 4 before 1",
        ),
        ({"selected": SparseVector.empty(0)}, "k must lie in 1..0 (the vector's length), got 2"),
    ],
)
@every_algorithm
def test_bad_arguments_are_refused_before_sending(
    algorithm: str, change: dict[str, object], text: str
) -> None:
    (transport,) = local_world(1)
    good = {"selected": entries([(1, 1.0), (2, 1.0)], 5, np.float32), "k": 2}
    with pytest.raises(ValueError, match=re.escape(text)):
        reduce(**{**good, "transport": transport, "algorithm": algorithm, **change})
    assert transport.traffic == Traffic(0, 0)


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (SparseVector.empty(8), "its length is (8 where this rank's is 7|7 where .* is 8)"),
        (SparseVector.empty(7, np.float64), "dtype is float.. where this rank's is float"),
    ],
)
def test_ranks_with_different_vectors_get_error_that_names_a_rank(
    algorithm: str, size: int, other: SparseVector, text: str
) -> None:
    picks = [other, *[SparseVector.empty(7)] * (size - 1)]
    with pytest.raises(MessageError, match=rf"message from rank \d is malformed: .*({text})"):
        run(algorithm, picks, 3)


@pytest.mark.parametrize(
    "other", [SparseVector.empty(4), SparseVector.empty(8, np.float64)], ids=["length", "dtype"]
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_dense_sum_of_different_vectors_raises_error_that_names_a_rank(
    size: int, other: SparseVector
) -> None:
    picks = [other, *[SparseVector.empty(8)] * (size - 1)]
    with pytest.raises(MessageError, match=r"message from rank \d is malformed: .* bytes"):
        run("dense", picks, 3)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(a, b) for a in ALGORITHMS for b in ALGORITHMS if a != b]
)
def test_ranks_with_different_algorithms_get_an_error(ours: str, theirs: str) -> None:
    picks = [entries([(rank, 1.0), (3, 2.0)], 9, np.float32) for rank in range(2)]
    with pytest.raises(MessageError, match=r"message from rank \d is malformed"):
        run_ranks(
            local_world(2, timeout_seconds=5),
            lambda t: reduce(picks[t.rank], 2, t, theirs if t.rank == 1 else ours),
        )


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
def test_damaged_message_raises_error_that_names_its_sender(algorithm: str) -> None:
    pick = entries([(1, 1.0), (4, 2.0)], 9, np.float32)
    message = encode(pick, 2).message
    for at in range(message.size):

        def program(transport: LocalTransport, at: int = at) -> object:
            if transport.rank == 1:
                original = transport.send

                def damaging(message: np.ndarray, to: int) -> Callable[[], None]:
                    damaged = message.copy()
                    damaged[damaged.size - 1 - at] ^= 0x40
                    return original(damaged, to)

                transport.send = damaging
            return reduce(pick, 2, transport, algorithm)

        with pytest.raises(MessageError, match="message from rank 1 is malformed"):
            run_ranks(local_world(2, timeout_seconds=5), program)


@merging_algorithm
def test_missing_alive_bits_raise_an_error(algorithm: str) -> None:
    pick = entries([(1, 1.0), (4, 2.0)], 9, np.float32)

    def program(transport: LocalTransport) -> object:
        if transport.rank == 2:
            return reduce(pick, 2, transport, algorithm)
        if transport.rank == 0:
            transport.receive(2)
            transport.send(
                encode(pick, 2, number=1).message, 2
            )()  # the right result without the alive bits
        return None

    with pytest.raises(MessageError, match=r"rank 0 is malformed: .* values is 0 where .* 1;"):
        run_ranks(local_world(3, timeout_seconds=5), program)
