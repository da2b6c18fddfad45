"""A message has its reduction's number; a rank refuses another number even if all else fits."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import MessageError, Transport, reduce, run_ranks
from collectives.transports import LocalTransport, local_world
from collectives.wire.message import MAGIC
from tests.collectives.algorithms.worlds import VARIANTS, entries

LENGTH, K = 9, 3
NUMBER_AT = 46  # byte offset in a message: wire/message.py
SPARSE = [variant for variant in VARIANTS if variant != "dense"]


def pick(rank: int) -> Any:
    return entries([(rank, 1.0), (7, 2.0)], LENGTH, np.float32)


def numbers_in(message: np.ndarray) -> list[int]:
    """Return the numbers in a message; an allgather's message contains several."""
    content = message.tobytes()
    places = [found.start() for found in re.finditer(MAGIC, content)]
    return [struct.unpack_from("<H", content, at + NUMBER_AT)[0] for at in places]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("variant", SPARSE)
def test_all_messages_of_a_reduction_carry_its_number(variant: str, size: int) -> None:
    algorithm, options = VARIANTS[variant]
    numbers: dict[int, set[int]] = defaultdict(set)

    def program(transport: LocalTransport) -> None:
        send_on, reductions = transport.send_on, []

        def send_and_record(stream: Transport, message: np.ndarray, to: int) -> Callable[[], None]:
            numbers[len(reductions)].update(numbers_in(message))
            return send_on(stream, message, to)

        transport.send_on = send_and_record
        while len(reductions) < 3:
            usual = options(size, K, LENGTH)
            reductions.append(len(reductions))
            reduce(pick(transport.rank), K, transport, algorithm, **usual)

    run_ranks(local_world(size, timeout_seconds=30), program)
    assert numbers == {1: {1}, 2: {2}, 3: {3}}


@pytest.mark.parametrize("variant", SPARSE)
def test_message_of_the_previous_reduction_is_refused(variant: str) -> None:
    """Only the number differs: the message is valid, and has the right length and k."""
    algorithm, options = VARIANTS[variant]
    kept: list[np.ndarray] = []

    def program(transport: LocalTransport) -> None:
        usual = options(2, K, LENGTH)
        if transport.rank == 1:
            send_on = transport.send_on

            def send_and_keep(
                stream: Transport, message: np.ndarray, to: int
            ) -> Callable[[], None]:
                kept.append(message.copy())
                return send_on(stream, message, to)

            def send_kept_message(
                stream: Transport, message: np.ndarray, to: int
            ) -> Callable[[], None]:
                return send_on(stream, kept.pop(0), to)

            transport.send_on = send_and_keep
            reduce(pick(1), K, transport, algorithm, **usual)
            transport.send_on = send_kept_message
        else:
            reduce(pick(0), K, transport, algorithm, **usual)
        reduce(pick(transport.rank), K, transport, algorithm, **usual)

    text = "from rank 1 is malformed: its operation's number is 1 where this rank's is 2;"
    with pytest.raises(MessageError, match=text):
        run_ranks(local_world(2, timeout_seconds=5), program)


@pytest.mark.parametrize("algorithm", ["gtopk", "topk-allgather"])
def test_duplicated_message_is_refused(algorithm: str) -> None:
    def program(transport: LocalTransport) -> None:
        send_on = transport.send_on

        def send_twice(stream: Transport, message: np.ndarray, to: int) -> Callable[[], None]:
            send_on(stream, message, to)
            return send_on(stream, message, to)

        if transport.rank == 1:
            transport.send_on = send_twice
        reduce(pick(transport.rank), K, transport, algorithm)
        reduce(pick(transport.rank), K, transport, algorithm)

    with pytest.raises(MessageError, match=r"from rank 1 is malformed: .* is 1 where .* is 2;"):
        run_ranks(local_world(2, timeout_seconds=5), program)


@pytest.mark.parametrize("variant", SPARSE)
def test_channels_and_subsets_number_their_reductions_separately(variant: str) -> None:
    """Reductions of a subset do not count as reductions of all ranks."""
    algorithm, options = VARIANTS[variant]

    def program(transport: LocalTransport) -> int:
        streams = [transport, transport.channel(1)]
        if transport.rank:
            streams += [transport.subset([1, 2]), transport.subset([1, 2]).channel(7)] * 3
        for stream in streams:
            usual = options(stream.size, K, LENGTH)
            reduce(pick(transport.rank), K, stream, algorithm, **usual)
            with stream.operation("an operation of the caller"):
                for _ in range(2):
                    reduce(pick(transport.rank), K, stream, algorithm, **usual)
        return transport.begun

    assert run_ranks(local_world(3, timeout_seconds=30), program) == [2, 2, 2]
