"""The wire's kernels on a GPU, against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.kernels import reference
from collectives.kernels.device import codes
from collectives.kernels.device.machine import Scratch
from collectives.wire.message import HEADER_BYTES

HEAD = slice(0, codes.HEAD_BYTES)
BODY = slice(HEADER_BYTES, None)


def expected(message: np.ndarray) -> int:
    return reference.checksum(message[BODY], reference.checksum(message[HEAD]))


def test_device_header_length_equals_the_wires() -> None:
    assert codes.HEAD_BYTES + codes.CHECKSUM_BYTES == HEADER_BYTES


@pytest.mark.parametrize("body", [0, 1, 7, 8, 4088, 4095, 4096, 4097, 8192, 40_963])
def test_written_header_has_the_references_checksum(
    scratch: Scratch, body: int, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    message = random.integers(0, 256, HEADER_BYTES + body, np.uint8)
    held = machine.put(message)
    codes.write_head(scratch, held, message[HEAD])
    written = machine.fetch(held)
    assert written[HEAD].tolist() == message[HEAD].tolist()
    assert written[BODY].tolist() == message[BODY].tolist()
    assert int(written[codes.HEAD_BYTES : HEADER_BYTES].view(np.uint64)[0]) == expected(message)


@settings(max_examples=20)
@given(st.binary(min_size=HEADER_BYTES, max_size=300))
def test_reading_a_header_takes_one_copy(scratch: Scratch, content: bytes) -> None:
    machine: Any = scratch.machine
    message = np.frombuffer(content, np.uint8)
    before = machine.fetched
    head, checksum = codes.read_head(scratch, machine.put(message))
    assert machine.fetched == before + 1
    assert head.tobytes() == content[:HEADER_BYTES]
    assert checksum == expected(message)


@settings(max_examples=60)
@given(
    st.lists(st.integers(-1, 12), max_size=6)
    | st.lists(st.integers(0, 9), max_size=6, unique=True).map(sorted),
    st.sampled_from("il"),
)
def test_in_order_equals_the_reference(scratch: Scratch, indices: list[int], code: str) -> None:
    machine: Any = scratch.machine
    array = np.array(indices, code)
    got = codes.in_order(scratch, machine.put(array), 10)
    assert got == reference.in_order(array, 10)
