"""Alive bits are packed into whole bytes and unpacked unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.algorithms.conservation import alive_bytes, pack_alive, unpack_alive


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_alive_bits_round_trip_in_the_fewest_bytes(count: int, random: np.random.Generator) -> None:
    alive = random.random(count) < 0.5
    bits = pack_alive(alive)
    assert bits.dtype == np.uint8
    assert bits.size == alive_bytes(count)
    assert 8 * alive_bytes(count) - count in range(8)
    back = unpack_alive(bits, count)
    assert back.dtype == np.bool_
    assert back.tolist() == alive.tolist()
