"""The predicted bytes of a message are the real ones."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import SparseVector, wire
from collectives.cost_model.schedules import (
    FORMATS,
    entropy_bits,
    message_bytes,
    most_message_bytes,
)
from collectives.wire import Format

LENGTH = 3_000_000
BLOCK = 1 << 16
LONG = 300 * BLOCK + 5
every_format = pytest.mark.parametrize("format", FORMATS, ids="+".join)


@cache
def spread_indices(entries: int, length: int) -> np.ndarray:
    random = np.random.default_rng(7)
    indices = np.unique(random.integers(0, length, 2 * entries))
    return np.sort(random.choice(indices, entries, replace=False)).astype(np.int32)


def spread(entries: int, dtype: type, length: int = LENGTH) -> SparseVector:
    return SparseVector(spread_indices(entries, length), np.ones(entries, dtype), length)


@every_format
@pytest.mark.parametrize("entries", [0, 1, 7, 300, 3000, 30_001, 300_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_message_length_is_as_predicted(format, entries, dtype):
    message = wire.encode(spread(entries, dtype), entries or 1, format).message
    predicted = message_bytes(entries, LENGTH, format, np.dtype(dtype).itemsize)
    if format.indices == "raw":
        assert predicted == message.size
    else:
        assert predicted == pytest.approx(message.size, rel=0.01, abs=64)


@every_format
@pytest.mark.parametrize("entries", [30, 300, 1000, 3000, 10_000])
def test_message_length_is_as_predicted_with_fewer_entries_than_blocks(format, entries):
    length = 2000 * BLOCK
    message = wire.encode(spread(entries, np.float32, length), entries, format).message
    assert message_bytes(entries, length, format) == pytest.approx(message.size, rel=0.01, abs=32)


@every_format
@pytest.mark.parametrize("entries", [30, 1000])
@pytest.mark.parametrize("part", [0, 1, 7])
def test_message_length_is_as_predicted_with_entries_in_one_part(format, entries, part):
    inside = spread(entries, np.float32, 2000 * BLOCK // 8)
    vector = inside.embed(part * inside.length, 8 * inside.length)
    message = wire.encode(vector, entries, format).message
    predicted = message_bytes(entries, vector.length, format, parts=8)
    assert predicted == pytest.approx(message.size, rel=0.01, abs=64)
    assert message.size <= most_message_bytes(entries, vector.length, format, parts=8)


def in_blocks(every: int, each: int) -> np.ndarray:
    """Return `each` indices at the start of one block in `every`, skipping the first block."""
    return (np.arange(every - 1, LONG // BLOCK, every)[:, None] * BLOCK + np.arange(each)).ravel()


PICKS = {
    "one": np.array([LONG - 1]),
    "even": np.arange(0, LONG, 1030),
    "close": np.arange(LONG - 5000, LONG),
    "far and close": np.concatenate([np.arange(0, LONG // 2, BLOCK), np.arange(LONG - 500, LONG)]),
    "uniform": spread(3000, np.float32, LONG).indices,
    "one in every other block": in_blocks(2, 1),
    "one in every other, many in some": np.union1d(in_blocks(2, 1), in_blocks(30, 1 << 14)),
    "some in every third block": in_blocks(3, 128),
    "long stretches of empty blocks": in_blocks(129, 3),
}


@every_format
@pytest.mark.parametrize("picks", PICKS.values(), ids=PICKS)
def test_message_length_is_at_most_the_predicted_maximum(format, picks):
    vector = SparseVector(picks.astype(np.int32), np.ones(picks.size, np.float32), LONG)
    message = wire.encode(vector, vector.entries, format).message
    assert message.size <= most_message_bytes(vector.entries, LONG, format)


@pytest.mark.parametrize(
    ("indices", "kind"), [("blocks", "one in every other block"), ("packed", "even")]
)
def test_predicted_maximum_is_nearly_reached(indices, kind):
    picks = PICKS[kind]
    vector = SparseVector(picks.astype(np.int32), np.ones(picks.size, np.float32), LONG)
    message = wire.encode(vector, vector.entries, Format(indices)).message
    assert most_message_bytes(vector.entries, LONG, Format(indices)) < 1.02 * message.size


@given(st.floats(1e-9, 1 - 1e-9))
def test_entropy_of_a_position_is_bounded(density):
    assert 0 < entropy_bits(density) <= math.log2(math.e / density) + 1e-6
