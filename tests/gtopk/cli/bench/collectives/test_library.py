"""What a library's collectives send is reckoned."""

from __future__ import annotations

import numpy as np

from collectives.transports import Transport
from gtopk.cli.bench.collectives.library import open_library


def test_what_a_library_sends_is_reckoned_at_the_least_there_can_be(threads) -> None:
    size = 4

    def program(transport: Transport) -> list[int]:
        library = open_library(transport, range(size))
        sent = []
        for operation in (
            lambda: library.allreduce(np.ones(1_000, np.float32)),
            lambda: library.allgather(np.zeros(50, np.uint8)),
            lambda: library.broadcast(np.zeros(50, np.uint8), 0),
        ):
            operation()
            sent.append(library.traffic.read_and_reset().sent_bytes)
        return sent

    *passing_on, last = threads(size, program)
    assert passing_on == [[6_000, 150, 50]] * 3
    assert last == [6_000, 150, 0]
