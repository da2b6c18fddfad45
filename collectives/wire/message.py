"""encode and decode: header, indices, values and extra put together, and taken apart."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ..errors import MessageError
from ..vector import Array, SparseVector, check, index_dtype
from . import header as headers
from .format import EXACT, INDEX_CODES, VALUE_CODES, Format
from .header import HEADER_BYTES, Header

NOBODY: Final = -1

_NOTHING: Final = np.empty(0, np.uint8)


class Encoded(NamedTuple):
    """A message, and what it says."""

    message: Array  # uint8 [m]
    vector: SparseVector  # what every receiver will decode: the same indices, rounded values


class Decoded(NamedTuple):
    """What a message says; the arrays may share its memory."""

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
) -> Encoded:
    """Write the vector into a message of a reduction with this k.

    extra: uint8 [m] that travels behind the values and comes out of `decode` unchanged.

    vector.values - encoded.vector.values, the rounding error, is exact in the values' dtype.
    """
    extra = _NOTHING if extra is None else extra
    count, value_bytes = vector.entries, vector.values.itemsize
    index_bytes = _padded(count * vector.indices.itemsize, value_bytes)
    values_from = HEADER_BYTES + index_bytes
    extra_from = values_from + count * value_bytes
    message = np.zeros(extra_from + extra.size, np.uint8)
    message[HEADER_BYTES:values_from].view(vector.indices.dtype)[:count] = vector.indices
    message[values_from:extra_from].view(vector.values.dtype)[:] = vector.values
    message[extra_from:] = extra
    headers.write(
        Header(
            index_code=INDEX_CODES.index(format.indices),
            value_code=VALUE_CODES.index(format.values),
            float_bytes=value_bytes,
            length=vector.length,
            entries=count,
            k=k,
            index_bytes=index_bytes,
            refused_by=refused_by,
            exponent=0,
            unused=0,
            extra_bytes=extra.size,
        ),
        message,
    )
    return Encoded(message, vector)


def decode(
    message: Array,
    like: SparseVector,
    k: int,
    sender: int,
    format: Format = EXACT,
    extra_bytes: int = 0,
) -> Decoded:
    """Return what a message of a reduction with this k and format says.

    like:   a vector of the expected length and value dtype.
    sender: the rank the message came from, for the error's text.
    extra_bytes: how many there must be.
    Raises MessageError when the message is anything but such a vector.
    """
    try:
        return _decode(message, like, k, format, extra_bytes)
    except ValueError as error:
        raise MessageError(f"the message from rank {sender} is malformed: {error}") from error


def _decode(
    message: Array, like: SparseVector, k: int, format: Format, extra_bytes: int
) -> Decoded:
    header = headers.read(message)
    _agree("format", _format(header), format)
    _agree("values' dtype", f"float{8 * header.float_bytes}", str(like.values.dtype))
    _agree("length", header.length, like.length)
    _agree("k", header.k, k)
    if not 0 <= header.entries <= header.length:
        raise ValueError(f"it announces {header.entries} entries of a vector of {header.length}")
    if header.refused_by < NOBODY:
        raise ValueError(f"it names rank {header.refused_by}")
    if header.exponent or header.unused:
        raise ValueError("a field of its header that must be 0 is not")
    if header.extra_bytes != extra_bytes:
        raise ValueError(
            f"it has {header.extra_bytes} bytes behind its values, expected {extra_bytes}"
        )
    dtype = index_dtype(header.length)
    index_bytes = _padded(header.entries * dtype.itemsize, header.float_bytes)
    if header.index_bytes != index_bytes:
        raise ValueError(
            f"its indices take {header.index_bytes} bytes, "
            f"{header.entries} entries take {index_bytes}"
        )
    values_from = HEADER_BYTES + index_bytes
    extra_from = values_from + header.entries * header.float_bytes
    if message.size != extra_from + extra_bytes:
        raise ValueError(
            f"{header.entries} entries take {extra_from + extra_bytes} bytes, it has {message.size}"
        )
    indices_to = HEADER_BYTES + header.entries * dtype.itemsize
    if message[indices_to:values_from].any():
        raise ValueError("its padding is not zero")
    vector = SparseVector(
        message[HEADER_BYTES:indices_to].view(dtype),
        message[values_from:extra_from].view(like.values.dtype),
        header.length,
    )
    return Decoded(check(vector), message[extra_from:], header.refused_by)


def _agree(what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise ValueError(
            f"its {what} is {theirs} where this rank's is {ours}; it must be the same on every rank"
        )


def _format(header: Header) -> Format:
    if header.index_code >= len(INDEX_CODES) or header.value_code >= len(VALUE_CODES):
        raise ValueError(
            f"its codes are numbers {header.index_code} and {header.value_code}; "
            f"this rank knows {len(INDEX_CODES)} and {len(VALUE_CODES)}"
        )
    return Format(INDEX_CODES[header.index_code], VALUE_CODES[header.value_code])


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
