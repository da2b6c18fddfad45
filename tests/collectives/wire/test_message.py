"""The message format: its bytes, and that malformed messages are refused."""

from __future__ import annotations

import itertools
import math
import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, SparseVector, kernels
from collectives.wire import (
    HEADER_BYTES,
    INDEX_CODES,
    NOBODY,
    VALUE_CODES,
    Format,
    decode,
    encode,
)
from collectives.wire.message import CodingTotals, coded

EXTRA = np.array([7, 255, 0], np.uint8)
NO_EXTRA = np.empty(0, np.uint8)
K = 3
FORMATS = [Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES]
every_format = pytest.mark.parametrize("format", FORMATS, ids="/".join)


def entries(indices: list[int], values: list[float], length: int, dtype=np.float32) -> SparseVector:
    index = np.int32 if length < 2**31 else np.int64
    return SparseVector(np.array(indices, index), np.array(values, dtype), length)


def sent(vector: SparseVector, extra: np.ndarray | None = None) -> np.ndarray:
    """Return the message of a reduction with k = K."""
    return encode(vector, K, extra=extra).message


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
    version: int = 4,
    codes: tuple[int, int] = (0, 0),
    index: str = "i",
    value: str = "f",
    float_bytes: int | None = None,
    count: int | None = None,
    k: int = K,
    index_bytes: int | None = None,
    padding: bytes = b"",
    refused_by: int = NOBODY,
    exponent: int = 0,
    number: int = 0,
    extra: bytes = b"",
    extra_bytes: int | None = None,
    checksum: int | None = None,
) -> np.ndarray:
    """Build the message of the pictures in wire/, or one with false values in the given fields."""
    index_part = struct.pack(f"<{len(indices)}{index}", *indices) + padding
    value_part = struct.pack(f"<{len(values)}{value}", *values)
    head = struct.pack(
        "<4sBBBBqqqqihHq",
        magic,
        version,
        *codes,
        struct.calcsize(f"<{value}") if float_bytes is None else float_bytes,
        length,
        len(indices) if count is None else count,
        k,
        len(index_part) if index_bytes is None else index_bytes,
        refused_by,
        exponent,
        number,
        len(extra) if extra_bytes is None else extra_bytes,
    )
    body = index_part + value_part + extra
    if checksum is None:
        checksum = checksum_of(body, checksum_of(head, 0))
    return np.frombuffer(head + struct.pack("<Q", checksum) + body, np.uint8)


def checksum_of(content: bytes, seed: int) -> int:
    return kernels.checksum(np.frombuffer(content, np.uint8), seed)


LIKE = entries([1, 4, 9], [1, -2, 3], 10)


# ---- the layout


def test_message_bytes_are_as_drawn() -> None:
    vector = entries([1, 4], [2.5, -1.0], 7)
    assert sent(vector).tobytes() == by_hand([1, 4], [2.5, -1.0], 7).tobytes()
    with_all = by_hand([1, 4], [2.5, -1.0], 7, k=9, extra=EXTRA.tobytes(), refused_by=3, number=8)
    encoded = encode(vector, 9, extra=EXTRA, refused_by=3, number=8)
    assert encoded.message.tobytes() == with_all.tobytes()
    wide = entries([1, 2**31], [2.5, -1.0], 2**31 + 1, np.float64)
    expected = by_hand([1, 2**31], [2.5, -1.0], 2**31 + 1, index="q", value="d")
    assert sent(wide).tobytes() == expected.tobytes()
    padded = entries([4], [2.5], 7, np.float64)
    assert sent(padded).tobytes() == by_hand([4], [2.5], 7, value="d", padding=bytes(4)).tobytes()


@pytest.mark.parametrize("count", [0, 1, 100])
def test_entry_takes_eight_bytes_after_a_header_of_64(count: int) -> None:
    vector = SparseVector.from_dense(np.ones(count, np.float32))
    assert sent(vector).size == 64 + 8 * count
    assert HEADER_BYTES == 64


# ---- round trips


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
def test_message_round_trips_to_the_bit(
    indices: list[int], length: int, dtype: type, extra: np.ndarray | None
) -> None:
    values = [-0.0, 5e-324, np.pi, 1e38][: len(indices)]
    vector = entries(indices, values, length, dtype)
    like = SparseVector.empty(length, dtype)
    encoded = encode(vector, K, extra=extra, refused_by=5)
    assert same(encoded.vector, vector)
    size = 0 if extra is None else extra.size
    decoded = decode(encoded.message, like, K, 3, extra_bytes=size)
    assert same(decoded.vector, vector)
    assert decoded.extra.tobytes() == (b"" if extra is None else extra.tobytes())
    assert decoded.refused_by == 5


def test_message_is_decoded_at_any_alignment() -> None:
    vector = entries([0, 2, 4], [1, 2, 3], 5, np.float64)
    buffer = np.empty(200, np.uint8)
    message = sent(vector, EXTRA)
    for start in range(8):
        place = buffer[start : start + message.size]
        place[:] = message
        decoded, bits, refused_by = decode(place, vector, K, 0, extra_bytes=EXTRA.size)
        assert same(decoded, vector)
        assert bits.tolist() == EXTRA.tolist()
        assert refused_by == NOBODY


def test_strided_vectors_are_encoded() -> None:
    indices, values = np.arange(10, dtype=np.int32), np.arange(10, dtype=np.float32)
    vector = SparseVector(indices[1::2], values[1::2], 10)
    decoded = decode(sent(vector), vector, K, 0).vector
    assert decoded.indices.tolist() == [1, 3, 5, 7, 9]
    assert decoded.values.tolist() == [1, 3, 5, 7, 9]


def test_encoding_and_decoding_change_no_argument() -> None:
    vector = entries([0, 2], [1, 2], 5)
    extra = EXTRA.copy()
    for array in (vector.indices, vector.values, extra):
        array.setflags(write=False)
    message = sent(vector, extra)
    message.setflags(write=False)
    assert same(decode(message, vector, K, 0, extra_bytes=EXTRA.size).vector, vector)


# ---- every format


@st.composite
def vectors(draw: st.DrawFn) -> SparseVector:
    """Return a vector of any length and density, of either dtype."""
    length = draw(st.sampled_from([0, 1, 9, 1000, 2**20, 2**31 - 1, 2**31, 2**40]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = min(length, draw(st.integers(0, 150)))
    span = draw(st.sampled_from([length, 5 * count, count]))
    indices = np.unique(random.integers(0, max(1, min(span, length)), count))
    values = random.standard_normal(indices.size) * 10.0 ** draw(st.integers(-30, 30))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return entries(indices.tolist(), values.tolist(), length, dtype)


@every_format
@settings(max_examples=60)
@given(vector=vectors(), extra=st.binary(max_size=9), spare=st.integers(0, 3))
def test_decoded_vector_equals_the_vector_that_encode_returned(
    format: Format, vector: SparseVector, extra: bytes, spare: int
) -> None:
    behind = np.frombuffer(extra, np.uint8)
    k = vector.entries + spare
    encoded = encode(vector, k, format, extra=behind, refused_by=spare)
    assert encoded.vector.indices.tolist() == vector.indices.tolist()
    if format.values == "exact":
        assert same(encoded.vector, vector)
    like = SparseVector.empty(vector.length, vector.values.dtype)
    decoded = decode(encoded.message, like, k, 3, format, behind.size)
    assert same(decoded.vector, encoded.vector)
    assert decoded.extra.tobytes() == extra
    assert decoded.refused_by == spare


@every_format
def test_entries_take_at_most_the_bytes_their_codes_promise(format: Format) -> None:
    count, length = 25_600, 25_600_000
    random = np.random.default_rng(1)
    indices = np.sort(random.choice(length, count, replace=False))
    vector = entries(indices.tolist(), random.standard_normal(count).tolist(), length)
    index_bytes = {"raw": 4, "blocks": 2.02, "packed": 1.46}[format.indices]
    value_bytes = {
        "exact": 4,
        "bf16": 2,
        "fp16": 2,
        "int8": 1 + 1 / 64,
        "int4": 4 / 8 + 1 / 256,
        "int3": 3 / 8 + 1 / 256,
        "int2": 1 / 5 + 1 / 240,
    }[format.values]
    message = encode(vector, count, format).message
    assert message.size <= 64 + math.ceil(count * (index_bytes + value_bytes))


@every_format
def test_message_without_entries_is_only_a_header(format: Format) -> None:
    for length in (0, 10, 2**40):
        empty = SparseVector.empty(length)
        message = encode(empty, 5, format).message
        assert message.size == HEADER_BYTES
        assert same(decode(message, empty, 5, 0, format).vector, empty)


@every_format
def test_decoded_raw_and_exact_parts_are_aligned_views(format: Format) -> None:
    for dtype in (np.float32, np.float64):
        vector = entries([0, 2, 70000], [1, 2, 3], 2**20, dtype)
        message = encode(vector, K, format).message
        indices, values, _ = decode(message, vector, K, 0, format).vector
        assert np.shares_memory(indices, message) == (format.indices == "raw")
        assert np.shares_memory(values, message) == (format.values == "exact")
        assert indices.flags.aligned
        assert values.flags.aligned


@pytest.mark.parametrize("theirs", FORMATS, ids="/".join)
def test_different_formats_raise_error_that_quotes_both(theirs: Format) -> None:
    message = encode(LIKE, K, theirs).message
    for ours in FORMATS:
        if ours == theirs:
            assert decode(message, LIKE, K, 7, ours).vector.entries == 3
            continue
        both = f"is {'/'.join(theirs)} .*'s is {'/'.join(ours)};"
        with pytest.raises(MessageError, match=f"from rank 7 is malformed: its format {both}"):
            decode(message, LIKE, K, 7, ours)


@every_format
def test_every_flipped_bit_is_detected_in_every_format(format: Format) -> None:
    message = encode(LIKE, K, format).message
    for at in range(8 * message.size):
        damaged = message.copy()
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(MessageError, match="from rank 5"):
            decode(damaged, LIKE, K, 5, format)


# ---- the operation's number


@pytest.mark.parametrize("number", [0, 1, 65_535, 65_536, 10**9])
def test_message_of_another_operations_number_is_refused(number: int) -> None:
    message = encode(LIKE, K, number=number).message
    assert same(decode(message, LIKE, K, 2, number=number).vector, LIKE)
    for other in (number + 1, number + 65_535):
        text = f"from rank 2 is malformed: its operation's number is {number % 65_536} where "
        with pytest.raises(MessageError, match=f"{text}this rank's is {other % 65_536};"):
            decode(message, LIKE, K, 2, number=other)


# ---- malformed messages


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (by_hand([1], [1], 10)[:63], "63 bytes are fewer than its header's 64"),
        (NO_EXTRA, "0 bytes are fewer"),
        (by_hand([1], [1], 10, magic=b"HTTP"), "begins with b'HTTP', not b'GTKV'"),
        (by_hand([1], [1], 10, version=3), "version 3; this rank uses version 4"),
        (by_hand([1], [1], 10, checksum=0), "checksum does not match"),
        (by_hand([1], [1], 10, checksum=2**64 - 1), "checksum does not match"),
        (by_hand([1], [1], 10, codes=(99, 0)), "codes have the numbers 99 and 0"),
        (by_hand([1], [1], 10, codes=(0, 99)), "codes have the numbers 0 and 99"),
        (by_hand([1], [1], 11), "length is 11 where this rank's is 10"),
        (by_hand([1], [1], 10, k=4), "its k is 4 where this rank's is 3; it must be the same"),
        (by_hand([1], [1], 10, value="d"), "dtype is float64 where this rank's is float32"),
        (by_hand([1], [1], 10, value="e"), "dtype is float16 where this rank's is float32"),
        (by_hand([1], [1], 10, index="q"), "4 bytes of indices are followed by more"),
        (by_hand([1], [1], 10, padding=bytes(4)), "4 bytes of indices are followed by more"),
        (by_hand([1], [1], 10, index_bytes=-4), "1 entries with -4 bytes of indices take 64 bytes"),
        (by_hand([1], [1], 10, refused_by=-2), "refusing rank is -2"),
        (by_hand([1], [1], 10, exponent=1), "exponent is 1"),
        (by_hand([1], [1], 10, number=7), "operation's number is 7 where this rank's is 0; it"),
        (by_hand([1], [1], 11, number=7), "operation's number is 7"),  # reported first
        (by_hand([1], [1], 10, count=-1), "announces -1 entries of a vector of 10"),
        (by_hand([1], [1], 10, count=11), "announces 11 entries of a vector of 10"),
        (
            by_hand([1], [1], 10, count=2),
            "2 entries with 4 bytes of indices take 76 bytes, it has 72",
        ),
        (by_hand([1, 2], [1], 10), "indices take 80 bytes, it has 76"),
        (by_hand([1, 2], [1, 1, 1], 10), "indices take 80 bytes, it has 84"),
        (by_hand([2, 1], [1, 1], 10), "strictly increasing, in 0..9"),
        (by_hand([1, 1], [1, 1], 10), "strictly increasing, in 0..9"),
        (by_hand([1, 10], [1, 1], 10), "strictly increasing, in 0..9"),
        (by_hand([-1, 1], [1, 1], 10), "strictly increasing, in 0..9"),
    ],
)
def test_malformed_message_raises_error_that_names_its_sender(
    message: np.ndarray, text: str
) -> None:
    with pytest.raises(MessageError) as caught:
        decode(message, LIKE, K, sender=6)
    assert "the message from rank 6 is malformed" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "expected", "text"),
    [
        (None, 3, "behind the values is 0 where this rank's is 3"),
        (EXTRA, 0, "behind the values is 3 where this rank's is 0"),
        (EXTRA, 2, "behind the values is 3 where this rank's is 2"),
        (EXTRA, 4, "behind the values is 3 where this rank's is 4"),
    ],
)
def test_missing_or_surplus_extra_bytes_raise_an_error(
    extra: np.ndarray | None, expected: int, text: str
) -> None:
    with pytest.raises(MessageError, match=f"from rank 2 is malformed.*{text}"):
        decode(sent(LIKE, extra), LIKE, K, 2, extra_bytes=expected)


def refused_or_same(message: np.ndarray, original: SparseVector, extra: np.ndarray | None) -> bool:
    """Tell whether a damaged message is refused; it fails where its content changed unnoticed."""
    size = 0 if extra is None else extra.size
    try:
        decoded, bits, refused_by = decode(message, original, K, 5, extra_bytes=size)
    except MessageError as error:
        return "from rank 5" in str(error)
    assert same(decoded, original)
    assert bits.tobytes() == (b"" if extra is None else extra.tobytes())
    assert refused_by == NOBODY
    return False


@pytest.mark.parametrize("extra", [None, NO_EXTRA, EXTRA], ids=["none", "empty", "three bytes"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_changed_byte_is_detected(count: int, extra: np.ndarray | None) -> None:
    vector = LIKE.where(np.arange(3) < count)
    message = sent(vector, extra)
    for at in range(message.size):
        for value in range(256):
            damaged = message.copy()
            damaged[at] = value
            changed = value != message[at]
            assert refused_or_same(damaged, vector, extra) == changed, (at, value)


@pytest.mark.parametrize("extra", [None, EXTRA], ids=["none", "three bytes"])
def test_every_lost_or_added_byte_is_detected(extra: np.ndarray | None) -> None:
    message = sent(LIKE, extra)
    for size in range(message.size):
        assert refused_or_same(message[:size], LIKE, extra)
        assert refused_or_same(message[message.size - size :], LIKE, extra)
    for added in (b"\0", b"\1", message.tobytes()):
        longer = np.frombuffer(message.tobytes() + added, np.uint8)
        assert refused_or_same(longer, LIKE, extra)


@settings(max_examples=500)
@given(st.binary(max_size=100), st.booleans())
def test_random_bytes_are_refused(content: bytes, plausible: bool) -> None:
    head = sent(LIKE)[: HEADER_BYTES - 8].tobytes() if plausible else b""
    with pytest.raises(MessageError, match="from rank 1"):
        decode(np.frombuffer(head + content, np.uint8), LIKE, K, 1)


small = st.integers(-2, 12)


@settings(max_examples=300)
@given(
    st.lists(small, max_size=5),
    st.integers(-3, 3),
    small,
    st.sampled_from("iq"),
    st.sampled_from("efd"),
    st.binary(max_size=3),
)
def test_message_with_a_valid_checksum_decodes_to_a_vector_or_is_refused(
    indices: list[int], surplus: int, length: int, index: str, value: str, extra: bytes
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
        decoded, bits, _ = decode(message, LIKE, K, 1, extra_bytes=len(extra))
    except MessageError:
        return
    assert same(decoded, entries(indices, [1.0] * len(indices), 10))
    assert bits.tobytes() == extra
    assert sorted(set(indices)) == indices
    assert set(indices) <= set(range(10))


def test_gpu_message_for_a_host_vector_is_refused_and_vice_versa() -> None:
    """Ranks over NCCL may pass vectors in different places."""
    gpu_array: Any = object()  # not a NumPy array
    on_host = entries([1], [1.0], 5)
    on_gpu = on_host._replace(values=gpu_array)
    for message, like, problem in (
        (gpu_array, on_host, "from a GPU, but this rank's vector is on the host"),
        (sent(on_host), on_gpu, "from the host, but this rank's vector is on a GPU"),
    ):
        with pytest.raises(
            MessageError, match=f"rank 1 is malformed: it comes {problem}; over NCCL"
        ):
            decode(message, like, K, sender=1)


def test_encoded_and_decoded_messages_are_counted_with_their_seconds(monkeypatch) -> None:
    clock = itertools.count(100.0, 0.25)  # each call is a quarter of a second later
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    vector, begun = entries([1, 5], [2.0, -3.0], 9), coded()
    message = encode(vector, K).message
    written = coded()
    assert coded(begun) == CodingTotals(0.25, 2, message.size)
    decode(message, vector, K, 0)
    assert coded(written) == CodingTotals(0.25)
