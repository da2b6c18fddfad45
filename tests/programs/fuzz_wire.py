"""Fuzz `decode` with mutated messages: it raises its own error, or both kernels read the same.

    python tests/programs/fuzz_wire.py --messages 1000000
    python tests/programs/sanitized.py FOLDER tests/programs/fuzz_wire.py --messages 100000

Most mutants get a new checksum, so that the code behind the check is reached. A message ends at an
unreadable page, so that reading beyond it crashes.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import re
import struct
import sys
import time
import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np

from collectives import MessageError, SparseVector, kernels
from collectives.kernels import host, reference
from collectives.kernels.host.library import load_error, use_instructions
from collectives.vector import check, index_dtype
from collectives.wire import HEADER_BYTES, NOBODY, VALUE_CODES, WHOLE, Format, decode, encode
from collectives.wire.format import ALL_INDEX_CODES
from collectives.wire.message import VERSION, checksum_of

SENDER = 4
FORMATS = [Format(indices, values) for indices in ALL_INDEX_CODES for values in VALUE_CODES]
# Offsets and widths of the header's fields, from wire/message.py.
FIELDS = [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 8), (16, 8), (24, 8), (32, 8), (40, 4)]
FIELDS += [(44, 2), (46, 2), (48, 8), (56, 8)]
# Weights of the kinds of mutation below; those that reach the parsers come more often.
MUTATIONS = [3, 3, 1, 1, 2, 2, 1, 2, 1, 3, 6]
BORDERS = [0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31]
BORDERS += [2**32, 2**47, 2**52, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


class Expected(NamedTuple):
    """What the receiver of a message expects."""

    like: SparseVector
    k: int
    format: Format
    extra_bytes: int
    number: int


class Sent(NamedTuple):
    """A valid message."""

    content: bytes
    expected: Expected


class Edge:
    """Memory that ends at an unreadable page."""

    def __init__(self, room: int) -> None:
        self.room = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.room + mmap.PAGESIZE)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        address = ctypes.c_void_p(self.bytes.ctypes.data + self.room)
        if protect(address, ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, content: bytes) -> np.ndarray:
        """Return the content as an array that ends at the unreadable page."""
        place = self.bytes[self.room - len(content) : self.room]
        place[:] = np.frombuffer(content, np.uint8)
        return place


def some_vector(dice: random.Random) -> SparseVector:
    """Return a vector of any length and density, spread or clustered, with values of any size."""
    length = dice.choice([1, 10, 100, 5000, 65536, 10**6, 2**31 - 1, 2**31, 2**40, 2**63 - 1])
    numbers = np.random.default_rng(dice.getrandbits(64))
    count = min(length, dice.choice([0, 1, 2, 3, 63, 64, 65, 130, 300]))
    if dice.random() < 0.5:
        positions = numbers.integers(0, length, count)
    else:
        steps = numbers.integers(1, dice.choice([2, 3, 70, 5000]), count)
        jumps = numbers.random(count) < 0.05
        steps = np.where(jumps, numbers.integers(1, max(2, length // 200), count), steps)
        positions = np.cumsum(steps) - 1
    indices = np.unique(positions[(positions >= 0) & (positions < length)])
    dtype = dice.choice([np.float32, np.float64])
    values = numbers.standard_normal(indices.size) * 2.0 ** dice.choice([0, 0, 100, -100, -140])
    if dice.random() < 0.1:
        values[: indices.size // 3] = dice.choice([np.nan, np.inf, 0.0])
    return SparseVector(indices.astype(index_dtype(length)), values.astype(dtype), length)


def some_message(dice: random.Random) -> Sent:
    """Return a valid message of any format."""
    vector, format = some_vector(dice), dice.choice(FORMATS)
    if format.indices == WHOLE:
        vector = SparseVector(
            np.arange(vector.entries, dtype=np.int32), vector.values, vector.entries
        )
    k = max(1, vector.entries) + dice.choice([0, 5])
    extra = np.frombuffer(dice.randbytes(dice.choice([0, 0, 1, 9])), np.uint8)
    refused_by = dice.choice([NOBODY, NOBODY, 0, 17])
    number = dice.choice([0, 1, 65535, 65536])
    message = encode(vector, k, format, extra=extra, refused_by=refused_by, number=number).message
    like = SparseVector.empty(vector.length, vector.values.dtype)
    return Sent(message.tobytes(), Expected(like, k, format, extra.size, number))


def mutated(content: bytes, other: bytes, dice: random.Random) -> bytes:
    """Return the content with one thing changed."""
    data = bytearray(content)
    at = dice.randrange(len(data))
    match dice.choices(range(11), MUTATIONS)[0]:
        case 0:
            data[at] ^= 1 << dice.randrange(8)
        case 1:
            data[at] = dice.choice([0, 1, 127, 128, 254, 255, dice.randrange(256)])
        case 2:
            del data[at:]
        case 3:
            data += dice.choice([bytes(dice.randrange(1, 20)), dice.randbytes(8), data[at:]])
        case 4:
            start, width = dice.choice(FIELDS)
            number = (dice.choice(BORDERS) + dice.choice([-1, 0, 1])) % 2 ** (8 * width)
            data[start : start + width] = number.to_bytes(width, "little")
        case 5:
            start, width = dice.choice(FIELDS)
            old = int.from_bytes(data[start : start + width], "little")
            number = (old + dice.choice([-64, -8, -2, -1, 1, 2, 4, 8, 64])) % 2 ** (8 * width)
            data[start : start + width] = number.to_bytes(width, "little")
        case 6:
            (a, width), (b, _) = dice.sample([field for field in FIELDS if field[1] == 8], 2)
            data[a : a + width], data[b : b + width] = data[b : b + width], data[a : a + width]
        case 7:
            cut = dice.randrange(len(other))
            data = data[:at] + other[cut:]
        case 8:
            data = data[:HEADER_BYTES] + other[HEADER_BYTES:]
        case 9:
            end = min(len(data), at + dice.choice([1, 2, 4, 8, 16]))
            data[at:end] = dice.choice([b"\0", b"\xff", b"\x80"]) * (end - at)
        case _:  # some bytes of the indices' part
            for _ in range(dice.randrange(1, 4)):
                place = dice.randrange(HEADER_BYTES, len(data)) if len(data) > 64 else at
                data[place] ^= dice.randrange(256)
    return bytes(data)


def consistent(content: bytes) -> bytes:
    """Return the content with its index-bytes field matching its size."""
    if len(content) < HEADER_BYTES or content[6] >= len(VALUE_CODES):
        return content
    (entries,), (extra_bytes,) = (struct.unpack_from("<q", content, at) for at in (16, 48))
    value_code = [*VALUE_CODES.values()][content[6]]
    rest = value_code.size_bytes(entries, content[7]) + extra_bytes
    index_bytes = (len(content) - HEADER_BYTES - rest) % 2**64
    return content[:32] + index_bytes.to_bytes(8, "little") + content[40:]


def sealed(content: bytes) -> bytes:
    """Return the content with a matching checksum."""
    if len(content) < HEADER_BYTES:
        return content
    message = np.frombuffer(bytearray(content), np.uint8)
    message[56:64] = np.frombuffer(struct.pack("<Q", checksum_of(message)), np.uint8)
    return message.tobytes()


def as_announced(content: bytes, expected: Expected) -> Expected:
    """Return what a receiver must expect so that the header's fields match."""
    if len(content) < HEADER_BYTES or content[4] != VERSION:
        return expected
    index, value, float_bytes, length, _, k = struct.unpack_from("<BBBqqq", content, 5)
    number, extra_bytes = struct.unpack_from("<Hq", content, 46)
    if index >= len(ALL_INDEX_CODES) or value >= len(VALUE_CODES) or float_bytes not in (4, 8):
        return expected
    if length < 0 or extra_bytes < 0:
        return expected
    like = SparseVector.empty(length, np.float32 if float_bytes == 4 else np.float64)
    format = Format([*ALL_INDEX_CODES][index], [*VALUE_CODES][value])
    return Expected(like, k, format, extra_bytes, number)


def outcome(message: np.ndarray, expected: Expected) -> tuple[object, ...] | str:
    """Return the content of a message, or the error that refused it."""
    like, k, format, extra_bytes, number = expected
    try:
        vector, extra, refused_by = decode(
            message, like, k, SENDER, format, extra_bytes, number=number
        )
    except MessageError as error:
        return str(error)
    check(vector)
    assert (vector.length, vector.values.dtype) == (like.length, like.values.dtype)
    assert extra.size == extra_bytes
    assert refused_by >= NOBODY
    # All NaNs count as equal.
    values = np.where(np.isnan(vector.values), np.nan, vector.values)
    return vector.indices.tobytes(), values.tobytes(), extra.tobytes(), refused_by


def fuzz(messages: int, seed: int, seconds: float) -> Counter[str]:
    """Mutate messages up to a number or a time; return how often each outcome occurred."""
    twins = [reference] if load_error() else [reference, host]
    edge, ends = Edge(1 << 16), Counter[str]()
    corpus_dice = random.Random(seed)
    corpus = [some_message(corpus_dice) for _ in range(400)]
    stop = time.monotonic() + seconds
    for number in range(messages):
        dice = random.Random(f"{seed}/{number}")
        if number % 50 == 0:
            corpus[dice.randrange(len(corpus))] = some_message(dice)
            if time.monotonic() > stop:
                break
        sent = dice.choice(corpus)
        content = sent.content
        for _ in range(dice.choice([1, 1, 1, 2, 3])):
            content = mutated(content or b"\0", dice.choice(corpus).content, dice)
        expected, resealed = sent.expected, dice.random() < 0.85
        if resealed:
            if dice.random() < 0.5:
                content = consistent(content)
            content = sealed(content)
            if dice.random() < 0.5:
                expected = as_announced(content, expected)
        results = []
        for twin in twins:
            kernels._for_numpy = twin
            results.append(outcome(edge.place(content), expected))
        assert results[0] == results[-1], f"message {number}: the kernels differ: {results}"
        if isinstance(results[0], str):
            assert f"the message from rank {SENDER} is malformed: " in results[0], results[0]
            ends[re.sub(r"-?\d+|b'.*?'|[a-z]+/[a-z0-9]+", "_", results[0].split(": ", 1)[1])] += 1
        else:
            assert resealed or content == sent.content, f"message {number} changed unnoticed"
            ends["(accepted)"] += 1
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instructions", default="", help="portable, AVX2 or AVX-512")
    arguments = parser.parse_args()
    print(f"C++ core: {load_error() or host.__file__}")
    if arguments.instructions and not use_instructions(arguments.instructions):
        raise SystemExit(f"this processor has no {arguments.instructions}")
    warnings.simplefilter("error")
    ends = fuzz(arguments.messages, arguments.seed, arguments.seconds)
    for end, count in ends.most_common():
        print(f"{count:10,}  {end}")
    print(f"{ends.total():10,}  messages, none crashed, hung or changed unnoticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
