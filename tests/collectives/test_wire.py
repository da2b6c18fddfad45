"""The message format: its bytes, and that nothing malformed gets through it."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, SparseVector
from collectives.wire import HEADER_BYTES, decode, encode

EXTRA = np.array([7, 255, 0], np.uint8)
NO_EXTRA = np.empty(0, np.uint8)


def entries(indices: list[int], values: list[float], length: int, dtype=np.float32) -> SparseVector:
    index = np.int32 if length < 2**31 else np.int64
    return SparseVector(np.array(indices, index), np.array(values, dtype), length)


def same(a: SparseVector, b: SparseVector) -> bool:
    """Tell whether two vectors are equal, dtypes and bits included."""
    return (
        a.length == b.length
        and (a.indices.dtype, a.values.dtype) == (b.indices.dtype, b.values.dtype)
        and a.indices.tobytes() == b.indices.tobytes()
        and a.values.tobytes() == b.values.tobytes()
    )


def by_hand(
    indices: list[int],
    values: list[float],
    length: int,
    *,
    magic: bytes = b"GTKV",
    version: int = 1,
    index: str = "i",
    value: str = "f",
    count: int | None = None,
    extra: bytes | None = None,
    flag: int | None = None,
    checksum: int | None = None,
) -> np.ndarray:
    """Build the message of the picture in wire.py, or one that lies in the fields given."""
    body = struct.pack(f"<{len(indices)}{index}{len(values)}{value}", *indices, *values)
    body += extra or b""
    head = struct.pack(
        "<4sBBBBqq",
        magic,
        version,
        struct.calcsize(f"<{index}"),
        struct.calcsize(f"<{value}"),
        (extra is not None) if flag is None else flag,
        length,
        len(indices) if count is None else count,
    )
    crc = zlib.crc32(head + body) if checksum is None else checksum
    return np.frombuffer(head + struct.pack("<q", crc) + body, np.uint8)


# ---- the layout


def test_the_bytes_are_those_of_the_picture() -> None:
    vector = entries([1, 4], [2.5, -1.0], 7)
    assert encode(vector).tobytes() == by_hand([1, 4], [2.5, -1.0], 7).tobytes()
    with_extra = by_hand([1, 4], [2.5, -1.0], 7, extra=EXTRA.tobytes())
    assert encode(vector, EXTRA).tobytes() == with_extra.tobytes()
    wide = entries([1, 2**31], [2.5, -1.0], 2**31 + 1, np.float64)
    expected = by_hand([1, 2**31], [2.5, -1.0], 2**31 + 1, index="q", value="d")
    assert encode(wide).tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [0, 1, 100])
def test_an_entry_takes_eight_bytes_behind_a_header_of_32(count: int) -> None:
    vector = SparseVector.from_dense(np.ones(count, np.float32))
    assert encode(vector).size == 32 + 8 * count
    assert HEADER_BYTES == 32


# ---- there and back


@pytest.mark.parametrize("extra", [None, NO_EXTRA, EXTRA], ids=["none", "empty", "three bytes"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("indices", "length"),
    [
        ([], 0),
        ([], 5),
        ([0], 1),
        ([0, 2, 4], 5),
        ([0, 2**31 - 2], 2**31 - 1),
        ([0, 2**31 - 1], 2**31),
        ([2**24, 2**24 + 1, 2**40], 2**41),
    ],
)
def test_there_and_back_is_the_same_to_the_bit(
    indices: list[int], length: int, dtype: type, extra: np.ndarray | None
) -> None:
    values = [-0.0, 5e-324, np.pi, 1e38][: len(indices)]
    vector = entries(indices, values, length, dtype)
    like = SparseVector.empty(length, dtype)
    decoded, bits = decode(encode(vector, extra), like, 3, 0 if extra is None else extra.size)
    assert same(decoded, vector)
    assert bits.tobytes() == (b"" if extra is None else extra.tobytes())


def test_a_message_may_lie_anywhere_in_memory() -> None:
    vector = entries([0, 2, 4], [1, 2, 3], 5, np.float64)
    buffer = np.empty(200, np.uint8)
    message = encode(vector, EXTRA)
    for start in range(8):
        place = buffer[start : start + message.size]
        place[:] = message
        decoded, bits = decode(place, vector, 0, EXTRA.size)
        assert same(decoded, vector)
        assert bits.tolist() == EXTRA.tolist()


def test_vectors_that_are_views_with_strides_can_be_sent() -> None:
    indices, values = np.arange(10, dtype=np.int32), np.arange(10, dtype=np.float32)
    vector = SparseVector(indices[1::2], values[1::2], 10)
    decoded, _ = decode(encode(vector), vector, 0)
    assert decoded.indices.tolist() == [1, 3, 5, 7, 9]
    assert decoded.values.tolist() == [1, 3, 5, 7, 9]


def test_sending_changes_nothing() -> None:
    vector = entries([0, 2], [1, 2], 5)
    extra = EXTRA.copy()
    for array in (vector.indices, vector.values, extra):
        array.setflags(write=False)
    message = encode(vector, extra)
    message.setflags(write=False)
    decoded, _ = decode(message, vector, 0, EXTRA.size)
    assert same(decoded, vector)


# ---- what is malformed

LIKE = entries([1, 4, 9], [1, -2, 3], 10)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (by_hand([1], [1], 10)[:31], "31 bytes are fewer than its header's 32"),
        (NO_EXTRA, "0 bytes are fewer"),
        (by_hand([1], [1], 10, magic=b"HTTP"), "begins with b'HTTP', not b'GTKV'"),
        (by_hand([1], [1], 10, version=2), "version 2; this rank speaks version 1"),
        (by_hand([1], [1], 11), "11 elements where this rank's has 10"),
        (by_hand([1], [1], 10, value="d"), "values have 8 bytes where this rank's float32"),
        (by_hand([1], [1], 10, value="e"), "values have 2 bytes where this rank's float32"),
        (by_hand([1], [1], 10, index="q"), "indices have 8 bytes, expected 4"),
        (by_hand([1], [1], 10, flag=2), "its extra flag is 2"),
        (by_hand([1], [1], 10, count=-1), "announces -1 entries of a vector of 10"),
        (by_hand([1], [1], 10, count=11), "announces 11 entries of a vector of 10"),
        (by_hand([1], [1], 10, count=2), "2 entries take 48 bytes, it has 40"),
        (by_hand([1, 2], [1, 1], 10, count=1), "1 entries take 40 bytes, it has 48"),
        (by_hand([1], [1], 10, checksum=0), "checksum does not match"),
        (by_hand([1], [1], 10, checksum=-1), "checksum does not match"),
        (by_hand([2, 1], [1, 1], 10), "strictly increasing, got 2 before 1"),
        (by_hand([1, 1], [1, 1], 10), "strictly increasing, got 1 before 1"),
        (by_hand([1, 10], [1, 1], 10), "must lie in 0..9, got 1..10"),
        (by_hand([-1, 1], [1, 1], 10), "must lie in 0..9, got -1..1"),
    ],
)
def test_a_malformed_message_is_an_error_that_names_the_sender(
    message: np.ndarray, text: str
) -> None:
    with pytest.raises(MessageError) as caught:
        decode(message, LIKE, sender=6)
    assert "the message from rank 6 is malformed" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sent", "expected", "text"),
    [
        (None, 3, "0 bytes behind its values, expected 3"),
        (EXTRA, 0, "3 bytes behind its values, expected 0"),
        (EXTRA, 2, "3 bytes behind its values, expected 2"),
        (EXTRA, 4, "3 bytes behind its values, expected 4"),
    ],
)
def test_extra_bytes_that_are_missing_or_too_many_are_an_error(
    sent: np.ndarray | None, expected: int, text: str
) -> None:
    with pytest.raises(MessageError, match=f"from rank 2 is malformed.*{text}"):
        decode(encode(LIKE, sent), LIKE, 2, expected)


def refused_or_same(message: np.ndarray, original: SparseVector, extra: np.ndarray | None) -> bool:
    """Tell whether a damaged message is refused; it fails where its content changed unnoticed."""
    size = 0 if extra is None else extra.size
    try:
        decoded, bits = decode(message, original, 5, size)
    except MessageError as error:
        return "from rank 5" in str(error)
    assert same(decoded, original)
    assert bits.tobytes() == (b"" if extra is None else extra.tobytes())
    return False


@pytest.mark.parametrize("extra", [None, NO_EXTRA, EXTRA], ids=["none", "empty", "three bytes"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_no_change_of_a_byte_goes_unnoticed(count: int, extra: np.ndarray | None) -> None:
    vector = LIKE.where(np.arange(3) < count)
    message = encode(vector, extra)
    for at in range(message.size):
        for value in range(256):
            damaged = message.copy()
            damaged[at] = value
            changed = value != message[at]
            assert refused_or_same(damaged, vector, extra) == changed, (at, value)


@pytest.mark.parametrize("extra", [None, EXTRA], ids=["none", "three bytes"])
def test_no_lost_or_added_byte_goes_unnoticed(extra: np.ndarray | None) -> None:
    message = encode(LIKE, extra)
    for size in range(message.size):
        assert refused_or_same(message[:size], LIKE, extra)
        assert refused_or_same(message[message.size - size :], LIKE, extra)
    for added in (b"\0", b"\1", message.tobytes()):
        longer = np.frombuffer(message.tobytes() + added, np.uint8)
        assert refused_or_same(longer, LIKE, extra)


@settings(max_examples=500)
@given(st.binary(max_size=100), st.booleans())
def test_random_bytes_are_refused(content: bytes, plausible: bool) -> None:
    head = encode(LIKE)[: HEADER_BYTES - 8].tobytes() if plausible else b""
    with pytest.raises(MessageError, match="from rank 1"):
        decode(np.frombuffer(head + content, np.uint8), LIKE, 1)


small = st.integers(-2, 12)


@settings(max_examples=300)
@given(
    st.lists(small, max_size=5),
    st.integers(-3, 3),
    small,
    st.sampled_from("iq"),
    st.sampled_from("efd"),
    st.none() | st.binary(max_size=3),
)
def test_whatever_a_message_says_with_a_right_checksum_is_a_vector_or_an_error(
    indices: list[int], surplus: int, length: int, index: str, value: str, extra: bytes | None
) -> None:
    message = by_hand(
        indices,
        [1.0] * len(indices),
        length,
        index=index,
        value=value,
        count=len(indices) + surplus,
        extra=extra,
    )
    try:
        decoded, bits = decode(message, LIKE, 1, len(extra or b""))
    except MessageError:
        return
    assert same(decoded, entries(indices, [1.0] * len(indices), 10))
    assert bits.tobytes() == (extra or b"")
    assert sorted(set(indices)) == indices
    assert set(indices) <= set(range(10))
