"""Nothing wrong gets a time."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import reduce
from collectives.transports import Transport
from gtopk.cli.bench.collectives.contenders import ContenderResult
from gtopk.cli.bench.collectives.run import (
    WrongResultError,
    check_agreement,
    check_conservation,
    digest,
    picks,
)

SIZE = 3
EVERYONE = [picks("uniform", 500, 50, rank, seed=1) for rank in range(SIZE)]


def outcome(transport: Transport) -> ContenderResult:
    return ContenderResult(*reduce(EVERYONE[transport.rank], 50, transport))


def test_what_conserves_passes(threads) -> None:
    def program(transport: Transport) -> None:
        check_conservation("gtopk", EVERYONE, outcome(transport), transport)

    threads(SIZE, program)


def test_a_lost_entry_is_found(threads) -> None:
    def program(transport: Transport) -> None:
        update, returned = outcome(transport)
        assert returned is not None
        short = ContenderResult(update, returned.where(np.arange(returned.entries) > 0))
        with pytest.raises(WrongResultError, match="lose nothing"):
            check_conservation("gtopk", EVERYONE, short, transport)

    threads(SIZE, program)


def test_an_update_that_is_another_by_one_bit_is_found() -> None:
    vector = EVERYONE[0]
    nudged = vector._replace(values=np.nextafter(vector.values, np.float32(9)))
    check_agreement("gtopk", [digest(vector), digest(vector)])
    with pytest.raises(WrongResultError, match="rank 1"):
        check_agreement("gtopk", [digest(vector), digest(nudged)])
    dense = vector.to_dense()
    with pytest.raises(WrongResultError):
        check_agreement("dense", [digest(dense), digest(-dense)])
