"""shards: each step sums one shard of the vector, densely, with rounded values.

    period 2      0 1 0 1 0 1 0 1       blocks of 256 elements; step t exchanges those of shard
                                        t mod period. No indices are sent
    a shard       | part 0 | part 1 | part 2 |      as many parts as ranks, each owned by one

    to owners     rank r sends Q(part p) to every owner p       P - 1 messages
                  and keeps part p - Q(part p)
    sum           the owner adds its own part, all received parts, and its kept error: T
    from owners   everyone gets U = Q(T)                        an allgather
                  the owner keeps the error T - U until the shard's next turn

A rank sends 2 (P-1)/P of the shard's values, so 2 (P-1)/P * b / (32 period) of the bytes of a
float32 gradient, if a value takes b bits. Top-k sends the large entries and their indices; this
sends all entries of, say, half of the vector. It does as well if all entries are of about the same
size, as Adam's steps are.

Conservation, coordinate by coordinate and summed over ranks: values + kept before = update + `lost`
+ kept after. Values are rounded as in `wire.format`, with exact errors.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from .. import wire
from ..errors import MessageError, NonFiniteError
from ..kernels import all_finite
from ..transports.transport import Transport
from ..vector import Array, SparseVector, all_indices, index_dtype, module_of
from ..wire import NOBODY, Encoded, Format
from .conservation import lowest_refusing
from .hierarchical import shard_bounds

BLOCK = 256  # consecutive elements in a shard
STAMP_BYTES = 4  # after the values: the number of their shard


class Shared(NamedTuple):
    """One rank's result of a shard's exchange.

    update: the agreed values of the shard, bit-identical on all ranks, [m].
    lost:   the rounding errors of this rank's values, to be added to its residual, [m].
    kept:   the rounding errors of the sum of the part that this rank owns, [own part].
    """

    update: Array
    lost: Array
    kept: Array


def shard_indices(shard: int, period: int, like: Array) -> Array:
    """Return the ascending indices of a shard's elements in the vector `like`, on its device.

    Each element is in exactly one of the shards 0 .. period - 1.
    """
    arrays, dtype = module_of(like), index_dtype(like.size)
    starts = arrays.arange(shard * BLOCK, like.size, period * BLOCK, dtype=dtype)
    indices: Array = (starts[:, None] + arrays.arange(BLOCK, dtype=dtype)).ravel()
    # The last block may reach beyond the vector's end.
    outside = int(starts[-1]) + BLOCK - like.size if starts.size else 0
    return indices[: indices.size - max(0, outside)]


def own_part(length: int, transport: Transport) -> slice:
    """Return the part that this rank owns of a shard of `length` elements."""
    return slice(*shard_bounds(length, transport.size)[transport.rank : transport.rank + 2])


def reduce(
    values: Array,
    kept: Array,
    transport: Transport,
    *,
    shard: int = 0,
    code: str = "int2",
    refuses: bool = False,
) -> Shared:
    """Sum a shard over the ranks.

    values:  this rank's, float32 or float64 [m], of as many elements on every rank.
    kept:    `Shared.kept` of the shard's last turn, [own part]; zeros in its first.
    shard:   the shard's number, 0 .. 2^31 - 1; MessageError if ranks pass different ones.
    code:    of the values on the wire: one of VALUE_CODES, equal on all ranks.
    refuses: this rank takes no part, for example since its gradient is not finite.
    Raises NonFiniteError, on all ranks alike, if one refuses, or if values or sums are not finite;
    MessageError and PeerError as reductions do.
    """
    with (
        transport.operation("a reduction by shards"),
        np.errstate(over="ignore", invalid="ignore"),  # an overflow raises NonFiniteError instead
    ):
        summed, lost, refused_by = to_owners(
            values, transport, shard=shard, code=code, refuses=refuses
        )
        total = np.add(summed, kept, out=summed)
        if refused_by == NOBODY:
            update, rounded, refused_by = _from_owners(total, values.size, transport, shard, code)
    if refused_by != NOBODY:
        raise NonFiniteError(refused_by)
    return Shared(update, lost, total - rounded)


def to_owners(
    values: Array,
    transport: Transport,
    *,
    shard: int = 0,
    code: str = "exact",
    refuses: bool = False,
) -> tuple[Array, Array, int]:
    """Add up each part of the ranks' values at its owner.

    Returns the sum of the part that this rank owns, the rounding errors of its other parts, [m],
    and the lowest rank that refused, or NOBODY; the same on every rank.
    """
    rank, size = transport.rank, transport.size
    bounds = shard_bounds(values.size, size)
    refused_by = transport.ranks[rank] if refuses or not all_finite(values) else NOBODY
    # A rank that refuses sends zeros: every peer still gets the message that it waits for.
    sent = values if refused_by == NOBODY else np.zeros_like(values)
    own = slice(*bounds[rank : rank + 2])
    lost = np.empty_like(values)
    lost[own] = 0
    # A copy, so that the caller's values are not modified.
    total = sent[own].copy()
    messages = []
    for distance in range(1, size):
        to = (rank + distance) % size
        part = slice(*bounds[to : to + 2])
        encoded = _encode(sent[part], transport, shard, code, refused_by)
        np.subtract(sent[part], encoded.vector.values, out=lost[part])
        messages.append((encoded.message, to))
    sources = [(rank - distance) % size for distance in range(1, size)]
    for source, message in zip(sources, transport.exchange_all(messages, sources), strict=True):
        received, source_refused_by = _decode(message, total, source, transport, shard, code)
        # In any order: only this owner adds these up.
        total += received
        refused_by = lowest_refusing(refused_by, source_refused_by)
    return total, lost, refused_by


def _from_owners(
    total: Array, length: int, transport: Transport, shard: int, code: str
) -> tuple[Array, Array, int]:
    """Return all owners' rounded sums, this rank's part of them, and the refusing rank."""
    rank, bounds = transport.rank, shard_bounds(length, transport.size)
    if transport.size == 1:  # nobody to save bytes for
        return total, total, NOBODY if all_finite(total) else transport.ranks[rank]
    refused_by = NOBODY if all_finite(total) else transport.ranks[rank]
    sent = total if refused_by == NOBODY else np.zeros_like(total)
    encoded = _encode(sent, transport, shard, code, refused_by)
    rounded = encoded.vector.values
    update = np.empty(length, total.dtype)
    for source, message in enumerate(transport.allgather(encoded.message)):
        part = update[bounds[source] : bounds[source + 1]]
        if source == rank:
            # The rounded values, so that all ranks have the same update, bit for bit.
            part[:] = rounded
            continue
        part[:], source_refused_by = _decode(message, part, source, transport, shard, code)
        refused_by = lowest_refusing(refused_by, source_refused_by)
    return update, rounded, refused_by


def _encode(values: Array, transport: Transport, shard: int, code: str, refused_by: int) -> Encoded:
    vector = SparseVector(all_indices(values.size, values), values, values.size)
    k = max(1, values.size)
    format = Format(wire.WHOLE, code)
    stamp = np.array([shard], np.int32).view(np.uint8)
    return wire.encode(
        vector, k, format, extra=stamp, refused_by=refused_by, number=transport.begun
    )


def _decode(
    message: Array, like: Array, source: int, transport: Transport, shard: int, code: str
) -> tuple[Array, int]:
    """Return the values of a part from a rank's message, and the rank that refused, or NOBODY."""
    expected = SparseVector.empty(like.size, like.dtype)
    sender, k = transport.ranks[source], max(1, like.size)
    format = Format(wire.WHOLE, code)
    decoded = wire.decode(message, expected, k, sender, format, STAMP_BYTES, number=transport.begun)
    sender_shard = int.from_bytes(decoded.extra.tobytes(), sys.byteorder)
    if sender_shard != shard:
        raise MessageError(
            f"rank {sender} exchanges shard {sender_shard}, but this rank exchanges shard {shard}; "
            "every rank must resume from the same step"
        )
    return decoded.vector.values, decoded.refused_by
