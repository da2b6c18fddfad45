"""encode and decode: put header, indices, values and extra together, and take them apart.

`coded` tells the time that this thread has spent on that, and the size of its messages.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

import numpy as np

from ..errors import MessageError
from ..ranges import profiled
from ..vector import Array, SparseVector, module_of
from . import header as headers
from .format import EXACT, Format, numbered, numbers
from .header import HEADER_BYTES, NUMBERS, Header
from .indices import ALL_INDEX_CODES
from .values import VALUE_CODES


class CodingTotals(NamedTuple):
    """Totals of encode and decode in a thread.

    seconds: the time of both.
    entries, bytes: of the messages that were written, headers included.
    """

    seconds: float = 0.0
    entries: int = 0
    bytes: int = 0

    def since(self, earlier: CodingTotals) -> CodingTotals:
        """Return the difference to earlier totals."""
        return CodingTotals(
            self.seconds - earlier.seconds,
            self.entries - earlier.entries,
            self.bytes - earlier.bytes,
        )


NOTHING_CODED: Final = CodingTotals()


class _OfThread(threading.local):
    """Totals by thread: a rank's messages are written and read by one thread, its engine's."""

    total = NOTHING_CODED


_here: Final = _OfThread()


def coded() -> CodingTotals:
    """Return this thread's totals since it began."""
    return _here.total


def count(seconds: float, entries: int = 0, message_bytes: int = 0) -> None:
    """Add a message that was written, or the time of reading one."""
    before = _here.total
    _here.total = CodingTotals(
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
    count(time.perf_counter() - begun, vector.entries, encoded.message.size)
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
    count, float_bytes = vector.entries, vector.values.itemsize
    value_bytes = value_code.size_bytes(count, float_bytes)
    # Room for the most that the code can take: how much it takes is known only once it is written.
    capacity = index_code.capacity(count, vector.length) + _MOST_PADDING
    arrays = module_of(vector.values)
    message = arrays.empty(HEADER_BYTES + capacity + value_bytes + extra.size, np.uint8)

    used = index_code.pack(vector.indices, vector.length, message[HEADER_BYTES:])
    # So that every value lies at a multiple of its size, and receivers view values in place.
    index_bytes = _padded(used, value_code.element_bytes(float_bytes))
    values_from = HEADER_BYTES + index_bytes
    extra_from = values_from + value_bytes
    message = message[: extra_from + extra.size]
    # The memory is not cleared, and the checksum covers the padding, which `_decode` examines.
    message[HEADER_BYTES + used : values_from] = 0
    packed = message[values_from:extra_from]
    exponent = value_code.pack(vector.values, packed)
    message[extra_from:] = arrays.asarray(extra)
    headers.write(
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
        # Out of the message itself: the bits that every receiver will decode.
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
    sender: the rank the message came from, for the error's text.
    extra_bytes: the number of extra bytes that it must have.
    number: of the operation that it must be a part of.
    A GPU's message gives a vector there; the host reads its header alone. Raises MessageError when
    the message is anything but such a vector.
    """
    begun = time.perf_counter()
    try:
        with profiled("decode"):
            decoded = _decode(message, like, k, format, extra_bytes, number)
    except ValueError as error:
        raise MessageError(f"the message from rank {sender} is malformed: {error}") from error
    count(time.perf_counter() - begun)
    return decoded


def _decode(
    message: Array, like: SparseVector, k: int, format: Format, extra_bytes: int, number: int
) -> Decoded:
    on_host = isinstance(message, np.ndarray)
    if on_host != isinstance(like.values, np.ndarray):
        places = ("the host", "a GPU") if on_host else ("a GPU", "the host")
        raise ValueError(
            f"it comes from {places[0]} where this rank's vector is on {places[1]}; over NCCL all "
            "ranks must pass vectors on GPUs, or none"
        )
    if not on_host and message.data.ptr % _MOST_PADDING:  # type: ignore[attr-defined]
        message = message.copy()  # part of a larger one: kernels need their elements aligned
    header = headers.read(message)
    count, float_bytes = header.entries, header.float_bytes
    # The number first, as the first difference is named: a message of another operation differs in
    # all else, too.
    theirs = (header.number, *header[:3], header.length, header.k, header.extra_bytes)
    ours = (number % NUMBERS, *numbers(format), like.values.itemsize, like.length, k, extra_bytes)
    if theirs != ours:
        raise _disagreement(theirs, ours)
    # The checksum only tells that the bytes are those that were sent: sizes are examined before
    # anything is read by them.
    if not 0 <= count <= header.length:
        raise ValueError(f"it announces {count} entries of a vector of {header.length}")
    if header.refused_by < NOBODY:
        raise ValueError(f"it names rank {header.refused_by}")
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


def _disagreement(theirs: tuple[int, ...], ours: tuple[int, ...]) -> ValueError:
    """Return the error that names the differences between the ranks."""
    said = [
        (
            ("operation's number", number),
            ("format", "/".join(numbered(index_code, value_code))),
            ("values' dtype", f"float{8 * float_bytes}"),
            ("length", length),
            ("k", k),
            ("number of bytes behind the values", extra_bytes),
        )
        for number, index_code, value_code, float_bytes, length, k, extra_bytes in (theirs, ours)
    ]
    what, got, wanted = next((a[0], a[1], b[1]) for a, b in zip(*said, strict=True) if a != b)
    return ValueError(
        f"its {what} is {got} where this rank's is {wanted}; it must be the same on every rank"
    )


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
