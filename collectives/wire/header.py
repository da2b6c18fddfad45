"""Header: the first 64 bytes of a message.

    byte  0        4         5         6        7       8        16        24    32
         +--------+---------+---------+--------+-------+--------+---------+-----+
         | "GTKV" | version | indices | values | float | length | entries |  k  |
         +--------+---------+---------+--------+-------+--------+---------+-----+
    byte  32            40           44         46       48            56         64
         +-------------+------------+----------+--------+-------------+----------+
         | index bytes | refused by | exponent | number | extra bytes | checksum |
         +-------------+------------+----------+--------+-------------+----------+

    indices, values   numbers of the codes, see format.py
    float             bytes of one value of the vector: 4 (float32) or 8 (float64)
    length, entries   of the vector: its elements, and the entries in this message
    k                 of the reduction; no message of it need have as many entries
    index bytes       of the indices' part, its padding included
    refused by        the lowest rank known to have refused its contribution, or -1
    exponent          the values' common power of two, where their code has one; else 0
    number            of the operation on its stream that the message is a part of, modulo 65536: it
                      reveals a message of another operation, sent twice or out of order
    checksum          of the 56 bytes before it and everything behind it

All little-endian.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from ..kernels import codes
from ..vector import Array

MAGIC: Final = b"GTKV"
# Increased with every change of the bytes: ranks of two versions refuse each other's messages.
VERSION: Final = 3
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


def write(header: Header, message: Array) -> None:
    """Fill in the header of a message whose other bytes are in place."""
    if not isinstance(message, np.ndarray):
        head = _FIELDS.pack(MAGIC, VERSION, *header)
        codes.write_head(message, np.frombuffer(head, np.uint8))
        return
    _FIELDS.pack_into(message.data, 0, MAGIC, VERSION, *header)
    _CHECKSUM.pack_into(message.data, _FIELDS.size, checksum(message))


def read(message: Array) -> Header:
    """Return the fields of a whole message; raise ValueError, with the reason, if it is invalid."""
    if message.size < HEADER_BYTES:
        raise ValueError(f"{message.size} bytes are fewer than its header's {HEADER_BYTES}")
    if isinstance(message, np.ndarray):
        head, expected = message, checksum(message)
    else:
        head, expected = codes.read_head(message)
    magic, version, *fields = _FIELDS.unpack_from(head.data)
    # Magic and version before the checksum: another version may compute it in another way.
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"it has format version {version}; this rank speaks version {VERSION}")
    if _CHECKSUM.unpack_from(head.data, _FIELDS.size) != (expected,):
        raise ValueError("its checksum does not match its content")
    return Header(*fields)


def checksum(message: Array) -> int:
    """Return the checksum that belongs into the message."""
    # In two parts, the first as the seed of the second: the checksum's own bytes lie between them.
    return codes.checksum(message[HEADER_BYTES:], codes.checksum(message[: _FIELDS.size]))
