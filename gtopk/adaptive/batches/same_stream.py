"""Whether all ranks read the same stream, by the samples that an iteration begins with.

    rank 0   (image, 3)    rank 1   (image', 3)     it is: of columns that tell samples apart one
             (image, 5)             (image', 5)     is the same on all ranks

    rank 0   (image, 3)    rank 1   (image', 3)     nobody knows: what is the same is so in all
             (image, 3)             (image', 3)     samples

What is drawn at random, as in augmentation, may differ; in a stream that ranks read parts of, every
column does that tells samples apart. An order of a data set's samples has to be the same whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.transports import Transport
from collectives.vector import Array

from ...optim.replicas.replicas import checksums
from ...runtime.coordinator.agreement import name_ranks


def columns_of(block: Sequence[Any]) -> Array:
    """Return the number of samples; of each column, whether it tells samples apart and a checksum.

    uint32 [1 + 2 columns]; of what has no checksum, 0 and 0.
    """
    rows = [[checksum(part) for part in _parts(sample)] for sample in block]
    if len({len(row) for row in rows}) > 1:  # lists of unlike length, say
        rows = [[checksum(sample)] for sample in block]
    told = [len(block)]
    for column in zip(*rows, strict=True):
        known = any(column)
        told.append(known and (len(set(column)) > 1 or len(column) == 1))
        told.append(known and zlib.crc32(np.array(column, np.uint32).data))
    return np.array(told, np.uint32)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum of tensors, arrays, numbers and strings, and what is made of them.

    before: of what comes before it; what has no checksum adds nothing: objects of one's own,
        tensors on no device, sparse, nested or quantized.
    """
    if isinstance(value, torch.Tensor):
        has_values = value.layout is torch.strided and not (
            value.is_meta or value.is_nested or value.is_quantized
        )
        return zlib.crc32(checksums([value]).data, before) if has_values else before
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), before)
    if isinstance(value, (bytes, bytearray)):
        return zlib.crc32(value, before)
    if isinstance(value, (str, int, float, complex, np.generic)):
        return zlib.crc32(repr(value).encode(), before)
    if isinstance(value, (Mapping, list, tuple)):
        for part in _parts(value):
            before = checksum(part, before)
    return before


def order_in_words(order: Sequence[Any]) -> str:
    """Return, in short, in which order an epoch's samples come: must be equal on all ranks."""
    if isinstance(order, range):  # may be as long as the world is wide
        return repr(order)
    try:
        if isinstance(order, torch.Tensor | np.ndarray):
            indices = np.asarray(order, np.int64)
        else:
            indices = np.fromiter(order, np.int64, len(order))
        told = zlib.crc32(np.ascontiguousarray(indices).data)
    except (TypeError, ValueError, OverflowError):  # indices of its own kind, such as names
        told = checksum(order)
    return f"an order of {len(order)} samples of checksum {told:08x}"


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # in no rank's own order
        return [value[key] for key in sorted(value, key=repr)]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def require_the_same(transport: Transport, own: Array) -> bool:
    """Return whether ranks have read the same samples; False where nobody knows, on all alike.

    own: this rank's `columns_of`. Raises MismatchError, on every rank, where they have not.
    """
    said = [row.view(np.uint32).tolist() for row in transport.allgather(own.view(np.uint8))]
    if len({(len(row), row[0]) for row in said}) == 1:
        by_rank = [zip(row[1::2], row[2::2], strict=True) for row in said]
        columns = [set(column) for column in zip(*by_rank, strict=True)]
        known = [column for column in columns if column != {(0, 0)}]
        agreeing = [column for column in known if len(column) == 1]
        if len(agreeing) == len(known):
            return True
        if agreeing:
            return any(tells for column in agreeing for tells, _ in column)
    sides: dict[str, list[int]] = {}
    for rank, row in zip(transport.ranks, said, strict=True):
        side = f"{row[0]} samples of checksum {zlib.crc32(np.array(row, np.uint32).data):08x}"
        sides.setdefault(side, []).append(rank)
    begins = "; ".join(f"{side} on {name_ranks(ranks)}" for side, ranks in sides.items())
    raise MismatchError(
        f"the ranks read unlike streams, which begin with {begins}. adapt reads the whole stream "
        "on every rank and keeps the rank's share: let the data set yield the same samples, in the "
        "same order, on all ranks, and none by rank; random augmentation belongs into collate_fn"
    )
