"""The bytes that are predicted of a message are those it has."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import SparseVector, wire
from collectives.planning.formats import FORMATS, entropy_bits, message_bytes

LENGTH = 3_000_000


def spread(entries: int, dtype: type) -> SparseVector:
    random = np.random.default_rng(7)
    indices = np.sort(random.choice(LENGTH, entries, replace=False)).astype(np.int32)
    return SparseVector(indices, np.ones(entries, dtype), LENGTH)


@pytest.mark.parametrize("format", FORMATS, ids="+".join)
@pytest.mark.parametrize("entries", [0, 1, 7, 300, 3000, 30_001, 300_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_message_is_as_long_as_predicted(format, entries, dtype):
    message = wire.encode(spread(entries, dtype), entries or 1, format).message
    predicted = message_bytes(entries, LENGTH, format, np.dtype(dtype).itemsize)
    if format.indices == "raw":
        assert predicted == message.size
    else:
        assert predicted == pytest.approx(message.size, rel=0.01, abs=64)


@given(st.floats(1e-9, 1 - 1e-9))
def test_a_position_takes_less_than_its_number(density):
    assert 0 < entropy_bits(density) <= math.log2(math.e / density) + 1e-6
