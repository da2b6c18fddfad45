"""The bandwidth of a link from the arrivals of a swap's pieces, however a network delivers them."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.cost_model.probes import PIECES, REQUEST_BYTES, _marginal_seconds_per_byte

PIECE_BYTES = 2000
SIZE = PIECES * PIECE_BYTES + REQUEST_BYTES


def arrivals(seconds: float, at_once: int, first: int) -> list[float]:
    """Return when pieces of `seconds` arrive that come in groups of `at_once`, after `first`."""
    ends = [min(PIECES, max(n, n + (first - n) % at_once)) for n in range(1, PIECES + 1)]
    return [seconds * end for end in ends]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_pieces_that_arrive_in_groups_do_not_inflate_bandwidth(at_once: int) -> None:
    for first in range(at_once):
        for seconds in (3e-3, 2e-6):
            found = _marginal_seconds_per_byte([arrivals(seconds, at_once, first)] * 3, SIZE)
            assert found == pytest.approx(seconds / PIECE_BYTES, rel=1e-9)


def test_pause_in_reading_does_not_change_the_bandwidth() -> None:
    arrived = np.array(arrivals(1e-3, 1, 0))
    for delayed in range(PIECES // 2 - 1, PIECES):
        read = arrived[delayed] + 3e-3
        late = np.where((arrived >= arrived[delayed]) & (arrived < read), read, arrived).tolist()
        found = _marginal_seconds_per_byte([late], SIZE)
        assert found == pytest.approx(1e-3 / PIECE_BYTES, rel=0.15)


def test_pieces_that_arrive_all_at_once_give_zero_seconds_per_byte() -> None:
    assert _marginal_seconds_per_byte([[1.0] * PIECES], SIZE) == 0.0
