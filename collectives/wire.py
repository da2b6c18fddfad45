"""A SparseVector as one contiguous message, and back.

    byte 0        4     5     6     7     8        16      24      32
         +--------+-----+-----+-----+-----+--------+-------+-------+---------+--------+-------+
         | "GTKV" | ver | idx | val | ext | length | count | crc32 | indices | values | extra |
         +--------+-----+-----+-----+-----+--------+-------+-------+---------+--------+-------+
    idx, val   bytes of one index (4, 8) and of one value (4, 8)
    ext        1 when bytes of the algorithm's own (alive bits) follow the values, else 0
    crc32      of everything behind the header

All little-endian. `decode` trusts nothing: whatever is wrong with a message ends in one
MessageError that says what and from which rank, before anything is done with its content.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np

from .errors import MessageError
from .vector import Array, SparseVector, check, index_dtype

MAGIC: Final = b"GTKV"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBBBBqqq")
HEADER_BYTES: Final = _HEADER.size


def encode(vector: SparseVector, extra: Array | None = None) -> Array:
    """Return the message, uint8 [HEADER_BYTES + count * (index + value bytes) + extra].

    extra: uint8 [m] that travels behind the values and comes out of `decode` unchanged.
    """
    body = [vector.indices.view(np.uint8), vector.values.view(np.uint8)]
    if extra is not None:
        body.append(extra)
    message = np.empty(HEADER_BYTES + sum(part.size for part in body), np.uint8)
    np.concatenate(body, out=message[HEADER_BYTES:])
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        vector.indices.itemsize,
        vector.values.itemsize,
        extra is not None,
        vector.length,
        vector.entries,
        zlib.crc32(message[HEADER_BYTES:].data),
    )
    message[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
    return message


def decode(message: Array, like: SparseVector, sender: int) -> tuple[SparseVector, Array]:
    """Return the vector in a message (its arrays share the message's memory) and the extra bytes.

    like:   a vector of the expected length and value dtype.
    sender: the rank the message came from, for the error's text.
    Raises MessageError when the message is anything but such a vector.
    """

    def refuse(reason: str) -> MessageError:
        return MessageError(f"the message from rank {sender} is malformed: {reason}")

    if message.size < HEADER_BYTES:
        raise refuse(f"{message.size} bytes are fewer than its header's {HEADER_BYTES}")
    magic, version, index_bytes, value_bytes, has_extra, length, count, crc = _HEADER.unpack(
        message[:HEADER_BYTES].tobytes()
    )
    if magic != MAGIC:
        raise refuse(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise refuse(f"it has format version {version}; this rank speaks version {VERSION}")
    if length != like.length:
        raise refuse(f"its vector has {length} elements where this rank's has {like.length}")
    if value_bytes != like.values.itemsize:
        raise refuse(f"its values have {value_bytes} bytes where this rank's {like.values.dtype}")
    indices_dtype = index_dtype(length)
    if index_bytes != indices_dtype.itemsize:
        raise refuse(f"its indices have {index_bytes} bytes, expected {indices_dtype.itemsize}")
    if has_extra not in (0, 1):
        raise refuse(f"its extra flag is {has_extra}")
    if not 0 <= count <= length:
        raise refuse(f"it announces {count} entries of a vector of {length}")
    values_from = HEADER_BYTES + count * index_bytes
    extra_from = values_from + count * value_bytes
    if message.size < extra_from or (not has_extra and message.size != extra_from):
        raise refuse(f"{count} entries take {extra_from} bytes, it has {message.size}")
    if crc != zlib.crc32(message[HEADER_BYTES:].data):
        raise refuse("its checksum does not match its content")
    vector = SparseVector(
        message[HEADER_BYTES:values_from].view(indices_dtype),
        message[values_from:extra_from].view(like.values.dtype),
        length,
    )
    try:
        check(vector)
    except ValueError as error:
        raise refuse(str(error)) from error
    return vector, message[extra_from:]
