"""MNIST's four files, plain or gzip, under their published names.

They are in the IDX format: a few sizes, then that many bytes.

    00 00 08 03        a zero, a zero, bytes (08), 3 dimensions
    00 00 EA 60        60,000: the first size, its highest byte first
    00 00 00 1C        28
    00 00 00 1C        28
    ...                60,000 * 28 * 28 bytes
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from .image_arrays import ImageArrays
from .labelled import LabelledData
from .malformed import MalformedFile

CLASSES: Final = 10
MEAN, DEVIATION = (0.1307,), (0.3081,)  # of the training pixels, from 0 to 1
_PARTS: Final = ("train", "t10k")
_BYTES: Final = 0x08  # IDX's code for unsigned bytes


def read_mnist(folder: str | Path) -> LabelledData:
    """Return MNIST, float32 [n, 1, rows, columns] in batches.

    Raises FileNotFoundError that names the missing file, MalformedFile, OSError.
    """
    train_path, test_path = (_found(Path(folder), f"{part}-images-idx3-ubyte") for part in _PARTS)
    train, test = read_idx(train_path, 3), read_idx(test_path, 3)
    if train.shape[1:] != test.shape[1:]:
        reason = f"has images of {_size(test)} where those of {train_path} have {_size(train)}"
        raise MalformedFile(test_path, None, reason)
    return LabelledData(
        _labelled(train, train_path, _PARTS[0]),
        _labelled(test, test_path, _PARTS[1]),
        CLASSES,
        "MNIST",
    )


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """Return uint8 [...] with this number of dimensions, also from a file that ends in .gz.

    Raises MalformedFile, a ValueError that names the file and the reason; OSError.
    """
    path = Path(path)
    header = struct.Struct(f">4B{dimensions}I")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            numbers = header.unpack(file.read(header.size))
            content = file.read()
    except (struct.error, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MalformedFile(path, None, f"is damaged, or ends too soon: {error}") from error
    if numbers[:4] != (0, 0, _BYTES, dimensions):
        reason = (
            f"must begin with 0000{_BYTES:02x}{dimensions:02x}: bytes in {dimensions} dimensions"
        )
        raise MalformedFile(path, None, reason)
    shape = numbers[4:]
    if not 1 <= math.prod(shape) == len(content):
        raise MalformedFile(path, None, f"holds {len(content)} bytes where its sizes are {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _size(images: np.ndarray) -> str:
    return "{} x {} pixels".format(*images.shape[1:])


def _labelled(images: np.ndarray, image_path: Path, part: str) -> ImageArrays:
    label_path = _found(image_path.parent, f"{part}-labels-idx1-ubyte")
    labels = read_idx(label_path, 1)
    if len(images) != len(labels):
        raise MalformedFile(
            label_path,
            None,
            f"has {len(labels)} labels where {image_path} has {len(images)} images",
        )
    if (wrong := np.flatnonzero(labels >= CLASSES)).size:
        place = int(wrong[0])
        raise MalformedFile(
            label_path, None, f"label {labels[place]} must lie in 0..{CLASSES - 1}", byte=8 + place
        )
    return ImageArrays(images[:, None], labels.astype(np.int64), MEAN, DEVIATION)


def _found(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no {name} or {name}.gz in '{folder}': MNIST's four files are needed")
