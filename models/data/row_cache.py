"""A cache beside a parsed file: arrays that are read once, for their checksum, then mapped.

    magic    checksum    length of the record    record    array    array ...
    8 bytes  8 bytes     8 bytes                 JSON      each begins at a multiple of 64

The checksum is zlib's crc32 of everything after it.

A cache is ignored if it belongs to another file, another time or another way of reading, is damaged
or has another version of this format. Where it cannot be written (a read-only folder, a full disk)
none is made.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from .rows import LabelledRows, LabelLists, SparseRows

SUFFIX: Final = ".rows"
_MAGIC: Final = b"csr-rows"
_VERSION: Final = 2  # 1 had no checksum, and may lack rows of a damaged bzip2 file
_ALIGNMENT: Final = 64
_CHECKED: Final = 16  # bytes before the checked ones
_RECORD: Final = 24  # bytes before the record
_DTYPES: Final = ("<i8", "<i4", "<f4", "<i8", "<i4")  # as `_arrays` has them


def cached(sources: Sequence[Path], way: str, parse: Callable[[], LabelledRows]) -> LabelledRows:
    """Return the result of `parse`, from the cache if it belongs to these unchanged sources.

    way: the way of reading; each way has its own cache.
    """
    path = sources[0].with_name(sources[0].name + SUFFIX)
    identity = _identity(sources, way)
    if (rows := _load(path, identity)) is not None:
        return rows
    rows = parse()
    if _identity(sources, way) == identity:  # the sources have not changed meanwhile
        with suppress(OSError):
            _save(path, identity, rows)
    return rows


def _identity(sources: Sequence[Path], way: str) -> dict[str, Any]:
    states = [source.stat() for source in sources]
    return {
        "version": _VERSION,
        "way": way,
        "sources": [[state.st_size, state.st_mtime_ns] for state in states],
    }


def _arrays(rows: LabelledRows) -> list[np.ndarray]:
    features, labels = rows.features, rows.labels
    return [features.offsets, features.indices, features.values, labels.offsets, labels.indices]


def _save(path: Path, identity: dict[str, Any], rows: LabelledRows) -> None:
    """Write a temporary file, and rename it to the cache once it is on disk."""
    arrays = [array.astype(dtype) for array, dtype in zip(_arrays(rows), _DTYPES, strict=True)]
    record = {
        **identity,
        "lengths": [len(array) for array in arrays],
        "widths": [rows.features.width, rows.labels.width],
        "origin": rows.origin,
    }
    parts = list(_parts(json.dumps(record).encode(), arrays))
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    file = written.open("xb")
    try:
        with file:
            file.write(_MAGIC + checksum.to_bytes(8, "little"))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power loss could leave a file of zeros
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _parts(record: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    """Yield the bytes after the checksum."""
    yield len(record).to_bytes(8, "little")
    yield record
    place = _RECORD + len(record)
    for array in arrays:
        yield bytes(-place % _ALIGNMENT)
        yield array.data
        place += -place % _ALIGNMENT + array.nbytes


def _load(path: Path, identity: dict[str, Any]) -> LabelledRows | None:
    """Return the rows; None where the file is missing or not valid."""
    try:
        whole = np.memmap(path, np.uint8, "r")
        if whole[:8].tobytes() != _MAGIC:
            return None
        checksum, length = whole[8:_RECORD].view("<u8").tolist()
        end = _RECORD + length
        record = json.loads(whole[_RECORD:end].tobytes())
        if any(record[name] != value for name, value in identity.items()):
            return None
        if zlib.crc32(whole[_CHECKED:].data) != checksum:
            return None
        arrays = []
        for length, dtype in zip(record["lengths"], _DTYPES, strict=True):
            begin = end + -end % _ALIGNMENT
            end = begin + length * np.dtype(dtype).itemsize
            arrays.append(np.asarray(whole[begin:end]).view(dtype))
        feature_width, label_width = record["widths"]
        features = SparseRows(arrays[0], arrays[1], arrays[2], feature_width)
        labels = LabelLists(arrays[3], arrays[4], label_width)
        rows = LabelledRows(features, labels, str(record["origin"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = end == len(whole) and len(features) == len(labels)
    sound = sound and len(features.values) == len(features.indices)
    return rows if sound and _is_sound(features) and _is_sound(labels) else None


def _is_sound(rows: SparseRows | LabelLists) -> bool:
    """Tell whether all offsets and indices are within the arrays."""
    offsets, indices = rows.offsets, rows.indices
    return bool(
        len(offsets)
        and offsets[0] == 0
        and offsets[-1] == len(indices)
        and (np.diff(offsets) >= 0).all()
        and (not len(indices) or (indices.min() >= 0 and indices.max() < rows.width))
    )
