"""encode and decode: a message from its header, indices, values and extra bytes, and back.

Header: the first 64 bytes of a message.

    byte  0        4         5         6        7       8        16        24    32
         +--------+---------+---------+--------+-------+--------+---------+-----+
         | "GTKV" | version | indices | values | float | length | entries |  k  |
         +--------+---------+---------+--------+-------+--------+---------+-----+
    byte  32            40           44         46       48            56         64
         +-------------+------------+----------+--------+-------------+----------+
         | index bytes | refused by | exponent | number | extra bytes | checksum |
         +-------------+------------+----------+--------+-------------+----------+

    indices, values   numbers of the codes, as format.py counts them
    float             bytes of one value of the vector: 4 (float32) or 8 (float64)
    length, entries   of the vector: its elements, and the entries in this message
    k                 of the reduction; a message may have fewer entries
    index bytes       of the indices, padding included
    refused by        the lowest rank known to have refused its contribution, or -1
    exponent          the values' common power of two, where their code has one; else 0
    number            of the operation on its stream, modulo 65536: detects a message of another
                      operation, sent twice or out of order
    checksum          of the 56 bytes before it and everything after it

All little-endian.

`coded` returns how long this thread has spent in encode and decode, and the size of its messages.
"""

from __future__ import annotations

import operator
import struct
import threading
import time
from typing import Final, NamedTuple

import numpy as np

from ..errors import MessageError
from ..kernels import checksum, read_head, write_head
from ..telemetry import profiled
from ..transports.transport import Transport
from ..vector import Array, SparseVector, module_of
from .format import ALL_INDEX_CODES, EXACT, VALUE_CODES, Format, numbered, numbers

MAGIC: Final = b"GTKV"
# Increased whenever the bytes change: ranks of two versions refuse each other's messages.
VERSION: Final = 4
_FIELDS: Final = struct.Struct("<4sBBBBqqqqihHq")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size
NUMBERS: Final = 1 << 16  # operations are numbered modulo this


class Header(NamedTuple):
    """The fields between version and checksum."""

    index_code: int
    value_code: int
    float_bytes: int
    length: int
    entries: int
    k: int
    index_bytes: int
    refused_by: int
    exponent: int
    number: int
    extra_bytes: int


def write_header(header: Header, message: Array) -> None:
    """Write the header of a message whose other bytes are in place, with its checksum."""
    if not isinstance(message, np.ndarray):
        head = _FIELDS.pack(MAGIC, VERSION, *header)
        write_head(message, np.frombuffer(head, np.uint8))
        return
    _FIELDS.pack_into(message.data, 0, MAGIC, VERSION, *header)
    _CHECKSUM.pack_into(message.data, _FIELDS.size, checksum_of(message))


def read_header(message: Array) -> Header:
    """Return the fields of a whole message; raise ValueError, with the reason, if it is invalid."""
    if message.size < HEADER_BYTES:
        raise ValueError(f"{message.size} bytes are fewer than its header's {HEADER_BYTES}")
    if isinstance(message, np.ndarray):
        head, expected = message, checksum_of(message)
    else:
        head, expected = read_head(message)
    magic, version, *fields = _FIELDS.unpack_from(head.data)
    # Magic and version before the checksum: another version may compute it in another way.
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"it has format version {version}; this rank uses version {VERSION}")
    if _CHECKSUM.unpack_from(head.data, _FIELDS.size) != (expected,):
        raise ValueError("its checksum does not match its content")
    return Header(*fields)


def checksum_of(message: Array) -> int:
    """Return the checksum of a message, of all bytes but the checksum's own."""
    # Those lie in the middle: the checksum of the bytes before seeds that of the bytes after.
    return checksum(message[HEADER_BYTES:], checksum(message[: _FIELDS.size]))


class CodingTotals(NamedTuple):
    """Totals of encode and decode in a thread.

    seconds: the time of both.
    entries, bytes: of the messages that were written, headers included.
    """

    seconds: float = 0.0
    entries: int = 0
    bytes: int = 0


NOTHING_CODED: Final = CodingTotals()


class _ThreadTotals(threading.local):
    """Totals by thread: the engine's thread writes and reads all of a rank's messages."""

    total = NOTHING_CODED


_thread_totals: Final = _ThreadTotals()


def coded(since: CodingTotals = NOTHING_CODED) -> CodingTotals:
    """Return this thread's totals since it began, less the totals `since`."""
    return CodingTotals(*map(operator.sub, _thread_totals.total, since))


def count(seconds: float, entries: int = 0, message_bytes: int = 0) -> None:
    """Add to this thread's totals; entries and bytes count for messages written only."""
    before = _thread_totals.total
    _thread_totals.total = CodingTotals(
        before.seconds + seconds, before.entries + entries, before.bytes + message_bytes
    )


NOBODY: Final = -1

_NOTHING: Final = np.empty(0, np.uint8)
_MOST_PADDING: Final = 8


class Encoded(NamedTuple):
    """A message, and the vector that it decodes to."""

    message: Array  # uint8 [m]
    vector: SparseVector  # what every receiver will decode: the same indices, rounded values


class Decoded(NamedTuple):
    """A message's content; the arrays may share its memory."""

    vector: SparseVector
    extra: Array  # uint8 [extra_bytes]
    refused_by: int  # the lowest rank known to have refused its contribution, or NOBODY


def encode(
    vector: SparseVector,
    k: int,
    format: Format = EXACT,
    *,
    extra: Array | None = None,
    refused_by: int = NOBODY,
    number: int = 0,
) -> Encoded:
    """Write the vector into a message of a reduction with this k.

    extra: uint8 [m] that travels behind the values and comes out of `decode` unchanged.
    number: of the operation that the message is a part of, as its transport counts them (`begun`).

    A GPU's vector gives a message there, in the formats ON_DEVICE; for a code that is not EXACT's
    the host waits for a few numbers.

    vector.values - encoded.vector.values, the rounding error, is exact in the values' dtype.
    """
    begun = time.perf_counter()
    with profiled("encode"):
        encoded = _encode(vector, k, format, extra, refused_by, number)
    count(time.perf_counter() - begun, vector.indices.size, encoded.message.size)
    return encoded


def _encode(
    vector: SparseVector,
    k: int,
    format: Format,
    extra: Array | None,
    refused_by: int,
    number: int,
) -> Encoded:
    extra = _NOTHING if extra is None else extra
    index_code, value_code = ALL_INDEX_CODES[format.indices], VALUE_CODES[format.values]
    count, float_bytes = vector.indices.size, vector.values.itemsize
    value_bytes = value_code.size_bytes(count, float_bytes)
    # Reserve the most bytes that the code can take; how many it does take, `pack` returns.
    capacity = index_code.capacity(count, vector.length) + _MOST_PADDING
    arrays = module_of(vector.values)
    message = arrays.empty(HEADER_BYTES + capacity + value_bytes + extra.size, np.uint8)

    used = index_code.pack(vector.indices, vector.length, message[HEADER_BYTES:])
    # Padded, so that values are aligned to their size and receivers can view them in place.
    index_bytes = _padded(used, value_code.element_bytes(float_bytes))
    values_from = HEADER_BYTES + index_bytes
    extra_from = values_from + value_bytes
    message = message[: extra_from + extra.size]
    # Clear the padding: the checksum covers it, and `_decode` requires zeros.
    message[HEADER_BYTES + used : values_from] = 0
    packed = message[values_from:extra_from]
    exponent = value_code.pack(vector.values, packed)
    message[extra_from:] = arrays.asarray(extra)
    write_header(
        Header(
            *numbers(format),
            float_bytes=float_bytes,
            length=vector.length,
            entries=count,
            k=k,
            index_bytes=index_bytes,
            refused_by=refused_by,
            exponent=exponent,
            number=number % NUMBERS,
            extra_bytes=extra.size,
        ),
        message,
    )
    if format.values != "exact":
        # Decode the message itself, to get the bits that every receiver will decode.
        rounded = value_code.unpack(packed, count, exponent, vector.values.dtype)
        vector = SparseVector(vector.indices, rounded, vector.length)
    return Encoded(message, vector)


def decode(
    message: Array,
    like: SparseVector,
    k: int,
    sender: int,
    format: Format = EXACT,
    extra_bytes: int = 0,
    number: int = 0,
) -> Decoded:
    """Return the content of a message of a reduction with this k and format.

    like:   a vector of the expected length and value dtype.
    sender: the rank that sent the message, for the error.
    extra_bytes: the number of extra bytes that it must have.
    number: of the operation that it must be a part of.
    A message on a GPU gives a vector there; the host reads only its header. Raises MessageError
    unless the message is such a vector.
    """
    begun = time.perf_counter()
    try:
        with profiled("decode"):
            decoded = _decode(message, like, k, format, extra_bytes, number)
    except ValueError as error:
        raise MessageError(f"the message from rank {sender} is malformed: {error}") from error
    count(time.perf_counter() - begun)
    return decoded


def receive(
    source: int,
    like: SparseVector,
    k: int,
    transport: Transport,
    format: Format = EXACT,
    extra_bytes: int = 0,
) -> Decoded:
    """Receive the next message of a rank and decode it; see `decode`."""
    message, sender = transport.receive(source), transport.ranks[source]
    return decode(message, like, k, sender, format, extra_bytes, transport.begun)


def allgather(
    message: Array,
    like: SparseVector,
    k: int,
    transport: Transport,
    format: Format = EXACT,
    extra_bytes: int = 0,
) -> list[Decoded]:
    """Allgather an encoded message, and return every rank's decoded, in rank order; see `decode`.

    This rank's own is decoded, too: where values were rounded, it must use what the others get.
    """
    return [
        decode(each, like, k, sender, format, extra_bytes, transport.begun)
        for each, sender in zip(transport.allgather(message), transport.ranks, strict=True)
    ]


def _decode(
    message: Array, like: SparseVector, k: int, format: Format, extra_bytes: int, number: int
) -> Decoded:
    on_host = isinstance(message, np.ndarray)
    if on_host != isinstance(like.values, np.ndarray):
        places = ("the host", "a GPU") if on_host else ("a GPU", "the host")
        raise ValueError(
            f"it comes from {places[0]}, but this rank's vector is on {places[1]}; over NCCL, "
            "either all ranks or none must pass vectors on GPUs"
        )
    if not on_host and message.data.ptr % _MOST_PADDING:  # type: ignore[attr-defined]
        message = message.copy()  # kernels need aligned elements
    header = read_header(message)
    count, float_bytes = header.entries, header.float_bytes
    # The error names the first difference. The number comes first, since a message of another
    # operation may differ in everything.
    received = (header.number, *header[:3], header.length, header.k, header.extra_bytes)
    own = (number % NUMBERS, *numbers(format), like.values.itemsize, like.length, k, extra_bytes)
    if received != own:
        raise _mismatch(received, own)
    # The checksum only proves that these bytes were sent: check every size before using it.
    if not 0 <= count <= header.length:
        raise ValueError(f"it announces {count} entries of a vector of {header.length}")
    if header.refused_by < NOBODY:
        raise ValueError(f"its refusing rank is {header.refused_by}")
    index_code, value_code = ALL_INDEX_CODES[format.indices], VALUE_CODES[format.values]
    if header.exponent not in value_code.exponents(like.values.dtype):
        raise ValueError(f"its exponent is {header.exponent}")

    values_from = HEADER_BYTES + header.index_bytes
    extra_from = values_from + value_code.size_bytes(count, float_bytes)
    if header.index_bytes < 0 or message.size != extra_from + extra_bytes:
        raise ValueError(
            f"{count} entries with {header.index_bytes} bytes of indices take "
            f"{extra_from + extra_bytes} bytes, it has {message.size}"
        )
    part = message[HEADER_BYTES:values_from]
    indices, used = index_code.unpack(part, count, header.length)
    padded = _padded(used, value_code.element_bytes(float_bytes))
    if part.size != padded or (padded != used and part[used:].any()):
        raise ValueError(f"{used} bytes of indices are followed by more than padding")
    values = value_code.unpack(
        message[values_from:extra_from], count, header.exponent, like.values.dtype
    )
    vector = SparseVector(indices, values, header.length)
    return Decoded(vector, message[extra_from:], header.refused_by)


def _mismatch(message_fields: tuple[int, ...], own_fields: tuple[int, ...]) -> ValueError:
    """Return the error that names the first difference between the ranks."""
    got, expected = (
        {
            "operation's number": number,
            "format": "/".join(numbered(index_code, value_code)),
            "values' dtype": f"float{8 * float_bytes}",
            "length": length,
            "k": k,
            "number of bytes behind the values": extra_bytes,
        }
        for number, index_code, value_code, float_bytes, length, k, extra_bytes in (
            message_fields,
            own_fields,
        )
    )
    name = next(name for name in got if got[name] != expected[name])
    return ValueError(
        f"its {name} is {got[name]} where this rank's is {expected[name]}; it must be the same on "
        "every rank"
    )


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
