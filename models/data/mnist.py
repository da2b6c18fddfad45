"""MNIST's four files, plain or gzip, under their published names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from .idx import read_idx
from .image_arrays import ImageArrays
from .labelled import LabelledData
from .malformed import MalformedFile

CLASSES: Final = 10
MEAN, DEVIATION = (0.1307,), (0.3081,)  # of the training pixels, from 0 to 1
_PARTS: Final = ("train", "t10k")


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
