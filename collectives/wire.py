"""A SparseVector as one contiguous message, and back.

    byte 0        4     5     6     7     8        16      24      32
         +--------+-----+-----+-----+-----+--------+-------+-------+---------+--------+-------+
         | "GTKV" | ver | idx | val | ext | length | count | crc32 | indices | values | extra |
         +--------+-----+-----+-----+-----+--------+-------+-------+---------+--------+-------+
    idx, val   bytes of one index (4, 8) and of one value (4, 8)
    ext        1 when bytes of the algorithm's own (alive bits) follow the values, else 0
    crc32      of everything else, the header before it included

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
_FIELDS: Final = struct.Struct("<4sBBBBqq")
_CHECKSUM: Final = struct.Struct("<q")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size


def encode(vector: SparseVector, extra: Array | None = None) -> Array:
    """Return the message, uint8 [HEADER_BYTES + count * (index + value bytes) + extra].

    extra: uint8 [m] that travels behind the values and comes out of `decode` unchanged.
    """
    body = [np.ascontiguousarray(part).view(np.uint8) for part in (vector.indices, vector.values)]
    if extra is not None:
        body.append(extra)
    message = np.empty(HEADER_BYTES + sum(part.size for part in body), np.uint8)
    np.concatenate(body, out=message[HEADER_BYTES:])
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        vector.indices.itemsize,
        vector.values.itemsize,
        extra is not None,
        vector.length,
        vector.entries,
    )
    message[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
    _CHECKSUM.pack_into(message.data, _FIELDS.size, _checksum(message))
    return message


def _checksum(message: Array) -> int:
    """Return the crc32 of all but the checksum: a damaged count must not go unnoticed either."""
    return zlib.crc32(message[HEADER_BYTES:].data, zlib.crc32(message[: _FIELDS.size].data))


def decode(
    message: Array, like: SparseVector, sender: int, extra_bytes: int = 0
) -> tuple[SparseVector, Array]:
    """Return the vector in a message (its arrays share the message's memory) and the extra bytes.

    like:   a vector of the expected length and value dtype.
    sender: the rank the message came from, for the error's text.
    extra_bytes: how many there must be.
    Raises MessageError when the message is anything but such a vector.
    """

    def refuse(reason: str) -> MessageError:
        return MessageError(f"the message from rank {sender} is malformed: {reason}")

    if message.size < HEADER_BYTES:
        raise refuse(f"{message.size} bytes are fewer than its header's {HEADER_BYTES}")
    magic, version, index_bytes, value_bytes, has_extra, length, count = _FIELDS.unpack_from(
        message.data
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
    if _CHECKSUM.unpack_from(message.data, _FIELDS.size) != (_checksum(message),):
        raise refuse("its checksum does not match its content")
    if message.size - extra_from != extra_bytes:
        raise refuse(
            f"it has {message.size - extra_from} bytes behind its values, expected {extra_bytes}"
        )
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
