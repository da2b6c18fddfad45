"""Messages have the documented layout, and invalid bytes only raise."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.runtime.object_codec import HEADER_BYTES, Code, decode, encode

HEADER = struct.Struct("<4sHHQQ")


def message(head: bytes, bulk: bytes = b"", flags: int = 0) -> bytes:
    """Return a message with a valid header, and any head and bulk."""
    content = head + bulk
    return HEADER.pack(b"GTKO", 1, flags, len(head), zlib.crc32(content)) + content


def packed(*values: object) -> bytes:
    """Return a head: codes as empty extensions, other values as msgpack encodes them."""
    packer = msgpack.Packer()
    return b"".join(
        packer.pack(msgpack.ExtType(value, b"") if isinstance(value, Code) else value)
        for value in values
    )


def test_message_has_the_documented_layout() -> None:
    data = encode({"lr": (0.5, torch.zeros(3))})
    head = packed(Code.DICT, 2, "lr", Code.TUPLE, 2, 0.5, Code.TENSOR, 3, "float32", False, 3, 12)
    assert data == message(head, bytes(12))
    assert len(data) == HEADER_BYTES + len(head) + 12


GOOD = encode([1, b"abc"])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "fewer than their header's 24"),
        (GOOD[:23], "fewer than their header's 24"),
        (b"NOPE" + GOOD[4:], "they begin with b'NOPE'"),
        (GOOD[:4] + b"\2" + GOOD[5:], "format version is 2"),
        (GOOD[:6] + b"\2" + GOOD[7:], "flags are 2"),
        (GOOD[:8] + b"\xff" * 8 + GOOD[16:], "head of 18446744073709551615 bytes"),
        (GOOD[:-1], "checksum"),
        (GOOD[:-1] + b"d", "checksum"),
        (message(b""), "OutOfData"),
        (message(packed(1, 2)), "something follows"),
        (message(packed(1), b"a"), "something follows"),
        (message(packed([])), "got a msgpack list"),
        (message(packed([1])), "max_array_len"),
        (message(packed({1: 2})), "max_map_len"),
        (message(packed(b"a")), "a plain value is missing, got a msgpack bytes"),
        (message(b"\xd6\xff\0\0\0\0"), "got a msgpack msgpack.ext.Timestamp"),
        (message(packed(msgpack.ExtType(99, b""), 0, 0)), "extension 99 is unknown"),
        (message(packed(msgpack.ExtType(Code.LIST, b"a"), 0)), "an extension holds data"),
        (message(packed(Code.LIST, -1)), "a count is missing"),
        (message(packed(Code.LIST, True, 1)), "a count is missing"),
        (message(packed(Code.LIST, 2**64 - 1, 1)), "OutOfData"),
        (message(packed(Code.BYTES, 0, 2**64 - 1), b"abc"), "18446744073709551615 bytes are"),
        (message(packed(Code.BYTES, 1, "utf-8", 3), b"abc"), "TypeError"),
        (message(packed(*[Code.LIST, 1] * 101, 0)), "nested more than 100 deep"),
        (message(packed(Code.SET, 2, 1, 1.0)), "a member twice"),
        (message(packed(Code.SET, 1, Code.LIST, 0)), "unhashable"),
        (message(packed(Code.DICT, 4, "a", 1, "a", 2)), "a key twice"),
        (message(packed(Code.DICT, 1, "a")), "ValueError"),
        (message(packed(Code.COUNTER, 4, "a", 1, "a", 2)), "a key twice"),
        (message(packed(Code.ORDERED_DICT, 0)), "IndexError"),
        (message(packed(Code.DEFAULT_DICT, 1, "eval")), "KeyError"),
        (message(packed(Code.RANGE, 3, 0, 1, 0)), "ValueError"),
        (message(packed(Code.TORCH_DTYPE, 1, "save")), "KeyError"),
        (message(packed(Code.TORCH_DEVICE, 1, "moon")), "RuntimeError"),
        (message(packed(Code.TORCH_SIZE, 1, -1)), "a dimension is missing"),
        (message(packed(Code.NUMPY_ARRAY, 2, "|O", 1, 8), b"12345678"), "dtype is unknown"),
        (message(packed(Code.NUMPY_ARRAY, 2, "i4,i4", 1, 8), b"12345678"), "dtype is unknown"),
        (message(packed(Code.NUMPY_ARRAY, 2, 7, 1, 8), b"12345678"), "TypeError"),
        (
            message(packed(Code.NUMPY_ARRAY, 2, "<f8", 2**60, 8), b"12345678"),
            "shape does not match",
        ),
        (message(packed(Code.NUMPY_ARRAY, 3, "<f8", 2**62, 0, 0)), "ValueError"),
        (message(packed(Code.NUMPY_ARRAY, 66, "|i1", *[1] * 65, 1), b"1"), "65 dimensions"),
        (message(packed(Code.NUMPY_ARRAY, 2, "|b1", 2, 2), b"\1\2"), "neither 0 nor 1"),
        (message(packed(Code.NUMPY_ARRAY, 2, ">U1", 1, 4), b"\0\x11\0\0"), "beyond Unicode"),
        (message(packed(Code.NUMPY_SCALAR, 2, "|i1", 1, 1), b"1"), "TypeError"),
        (message(packed(Code.TENSOR, 3, "float32", False, 2**61, 8), b"12345678"), "not match"),
        (message(packed(Code.TENSOR, 5, "int8", False, 0, 2**62, 2**62, 0)), "RuntimeError"),
        (message(packed(Code.TENSOR, 3, "quint8", False, 1, 1), b"1"), "quantized"),
        (message(packed(Code.TENSOR, 3, "int8", True, 1, 1), b"1"), "RuntimeError"),
        (message(packed(Code.TENSOR, 3, "bool", False, 1, 1), b"\2"), "neither 0 nor 1"),
        (message(packed(Code.TENSOR, 3, "int8", False, -1, 0)), "a dimension is missing"),
    ],
)
def test_malformed_bytes_are_refused_with_a_reason(
    refused: Callable[[bytes], str], data: bytes, reason: str
) -> None:
    assert reason in refused(data)


def test_decode_refuses_arrays_that_are_not_contiguous_bytes() -> None:
    with pytest.raises(TypeError, match="contiguous bytes"):
        decode(np.zeros(40, np.float32))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="contiguous bytes"):
        decode(np.zeros(80, np.uint8)[::2])


def test_pickle_that_fails_to_load_is_malformed(
    refused: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "1")
    assert "UnpicklingError" in refused(message(packed(Code.PICKLE, 0, 3), b"abc", flags=1))


@given(st.binary())
def test_random_bytes_are_refused(refused: Callable[[bytes], str], data: bytes) -> None:
    refused(data)


@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(0, 1))
def test_random_head_decodes_or_is_refused(
    decodes_or_is_refused: Callable[[bytes], None], head: bytes, bulk: bytes, flags: int
) -> None:
    decodes_or_is_refused(message(head, bulk, flags))


@given(
    st.lists(
        st.sampled_from(list(Code))
        | st.integers(0, 4)
        | st.sampled_from(["float32", "bool", "complex32", "<f4", "|b1", "<U1", "|S0", "list"])
        | st.sampled_from([None, True, 0.5, -1, 2**63])
    ),
    st.binary(max_size=32),
)
@settings(max_examples=500)
def test_random_order_of_values_decodes_or_is_refused(
    decodes_or_is_refused: Callable[[bytes], None], values: list[Any], bulk: bytes
) -> None:
    decodes_or_is_refused(message(packed(*values), bulk))
