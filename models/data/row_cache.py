"""A parsed file, kept beside it as arrays that are mapped into memory, not read.

    magic  8 bytes    length of the record, 8 bytes    record, JSON    array    array ...
                                                       each array begins at a multiple of 64

A cache that is of another file, of another time, read in another way, damaged or of another version
of this format is passed over. Where it cannot be written (a folder that is read-only, a full disk)
there is none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from .rows import LabelledRows, LabelLists, SparseRows

SUFFIX: Final = ".rows"
_MAGIC: Final = b"csr-rows"
_VERSION: Final = 2  # 1 may lack rows of a damaged bzip2 file
_ALIGNMENT: Final = 64
_DTYPES: Final = ("<i8", "<i4", "<f4", "<i8", "<i4")  # as `_arrays` has them


def cached(sources: Sequence[Path], way: str, parse: Callable[[], LabelledRows]) -> LabelledRows:
    """Return what `parse` returns, from the cache where there is one of these sources as they are.

    way: how they are read; another way is another cache.
    """
    path = sources[0].with_name(sources[0].name + SUFFIX)
    identity = _identity(sources, way)
    if (rows := _load(path, identity)) is not None:
        return rows
    rows = parse()
    if _identity(sources, way) == identity:  # nobody has written to them meanwhile
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
    """Write it beside, and put it in place at once."""
    arrays = [array.astype(dtype) for array, dtype in zip(_arrays(rows), _DTYPES, strict=True)]
    record = {
        **identity,
        "lengths": [len(array) for array in arrays],
        "widths": [rows.features.width, rows.labels.width],
        "origin": rows.origin,
    }
    said = json.dumps(record).encode()
    written = path.with_name(f".{path.name}.{os.getpid()}")
    file = written.open("xb")
    try:
        with file:
            file.write(_MAGIC + len(said).to_bytes(8, "little") + said)
            for array in arrays:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                file.write(array.data)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _load(path: Path, identity: dict[str, Any]) -> LabelledRows | None:
    """Return the rows; None where the file is not there, or not what it must be."""
    try:
        whole = np.memmap(path, np.uint8, "r")
        if whole[:8].tobytes() != _MAGIC:
            return None
        end = 16 + int.from_bytes(whole[8:16].tobytes(), "little")
        record = json.loads(whole[16:end].tobytes())
        if any(record[name] != value for name, value in identity.items()):
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
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = end == len(whole) and len(features) == len(labels)
    sound = sound and len(features.values) == len(features.indices)
    return rows if sound and _is_sound(features) and _is_sound(labels) else None


def _is_sound(rows: SparseRows | LabelLists) -> bool:
    """Tell whether nothing points out of the arrays."""
    offsets, indices = rows.offsets, rows.indices
    return bool(
        len(offsets)
        and offsets[0] == 0
        and offsets[-1] == len(indices)
        and (np.diff(offsets) >= 0).all()
        and (not len(indices) or (indices.min() >= 0 and indices.max() < rows.width))
    )
