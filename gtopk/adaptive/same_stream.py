"""Whether all ranks read the same stream, by the samples that an iteration begins with.

    rank 0   (image, label)    rank 1   (image', label)     it is: of columns that tell samples
             (image, label)             (image', label)     apart one is the same on all ranks

What is drawn at random, as in augmentation, may differ; in a stream that ranks read parts of, every
column does.
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

from ..agreement import name_ranks
from ..replicas import checksums


def columns_of(block: Sequence[Any]) -> Array:
    """Return the number of samples, and a checksum of each of their columns: uint32 [1 + columns].

    0: of a column that is alike in all samples, or of what has no checksum.
    """
    rows = [[checksum(part) for part in _parts(sample)] for sample in block]
    if len({len(row) for row in rows}) > 1:  # lists of unlike length, say
        rows = [[checksum(sample)] for sample in block]
    told = [len(block)]
    for column in zip(*rows, strict=True):
        tells = len(set(column)) > 1 or (len(column) == 1 and column[0])
        told.append(zlib.crc32(np.array(column, np.uint32).data) if tells else 0)
    return np.array(told, np.uint32)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum of tensors, arrays, numbers and strings, and what is made of them.

    before: of what comes before it; what has no checksum adds nothing.
    """
    if isinstance(value, torch.Tensor):
        try:
            return zlib.crc32(checksums([value]).data, before)
        except (RuntimeError, NotImplementedError):  # sparse or on no device: no memory to read
            return before
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


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # in no rank's own order
        return [value[key] for key in sorted(value, key=repr)]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def require_the_same(transport: Transport, own: Array) -> None:
    """Raise MismatchError, on every rank alike, where ranks have read unlike samples."""
    said = [row.view(np.uint32).tolist() for row in transport.allgather(own.view(np.uint8))]
    if len({(len(row), row[0]) for row in said}) == 1:
        columns = [set(column) for column in list(zip(*said, strict=True))[1:]]
        telling = [column for column in columns if column != {0}]
        if not telling or any(len(column) == 1 for column in telling):
            return
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
