"""The bytes of a library's allreduce come from a formula."""

from __future__ import annotations

import numpy as np

from collectives.transports import Transport
from gtopk.cli.bench.collectives.library import open_library


def test_library_allreduce_counts_the_least_possible_bytes(threads) -> None:
    def program(transport: Transport) -> int:
        library = open_library(transport, range(4))
        library.allreduce(np.ones(1_000, np.float32))
        return library.traffic.read_and_reset().sent_bytes

    assert threads(4, program) == [6_000] * 4
