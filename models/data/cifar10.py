"""CIFAR-10's published files: the binary version, and the Python version.

binary     data_batch_1.bin ... data_batch_5.bin, test_batch.bin: rows of a label and 3,072 bytes
Python     data_batch_1 ... data_batch_5, test_batch: pickles of {b"labels": [int, ...],
           b"data": uint8 [rows, 3072], ...}; the unpickler makes nothing but NumPy's arrays

An image is 1,024 bytes of red, 1,024 of green, 1,024 of blue, row by row.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Final

import numpy as np

from .image_arrays import ImageArrays
from .labelled import LabelledData
from .malformed import MalformedFile

CLASSES: Final = 10
SHAPE: Final = (3, 32, 32)
IMAGE_BYTES: Final = 3 * 32 * 32
ROWS: Final = 10_000  # in each of the files
MEAN, DEVIATION = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)  # of red, green, blue, from 0 to 1
TRAIN: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST: Final = ("test_batch",)
_FOLDERS: Final = ("", "cifar-10-batches-bin", "cifar-10-batches-py")


def read_cifar10(folder: str | Path, *, seed: int = 0, rows: int = ROWS) -> LabelledData:
    """Return CIFAR-10; training images are cropped and mirrored at random.

    folder: has the files of either version, or the folder from their archive.
    rows: the number of images that each file must have.
    Raises FileNotFoundError that names the missing files, MalformedFile, OSError.
    """
    found = _find(Path(folder))
    (train_images, train_labels), (test_images, test_labels) = (
        _read_files([found / f"{name}{_ending(found)}" for name in names], rows)
        for names in (TRAIN, TEST)
    )
    return LabelledData(
        ImageArrays(train_images, train_labels, MEAN, DEVIATION, augmented=True, seed=seed),
        ImageArrays(test_images, test_labels, MEAN, DEVIATION),
        CLASSES,
        "CIFAR-10",
    )


def read_binary_batch(path: str | Path, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [rows, 3, 32, 32], and labels, int64 [rows], of a binary file.

    Raises MalformedFile, OSError.
    """
    table = np.fromfile(path, np.uint8)
    if table.size != rows * (1 + IMAGE_BYTES):
        reason = f"must hold {rows} images of {1 + IMAGE_BYTES} bytes, has {table.size} bytes"
        raise MalformedFile(Path(path), None, reason)
    table = table.reshape(rows, 1 + IMAGE_BYTES)
    if (wrong := np.flatnonzero(table[:, 0] >= CLASSES)).size:
        row = int(wrong[0])
        raise MalformedFile(
            Path(path),
            None,
            f"label {table[row, 0]} of image {row} must lie in 0..{CLASSES - 1}",
            byte=row * (1 + IMAGE_BYTES),
        )
    return table[:, 1:].reshape(rows, *SHAPE), table[:, 0].astype(np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles plain values and NumPy's arrays, and refuses all other calls."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it would call {module}.{name}")
        return _ALLOWED[module, name]


# An array's pickle makes an empty array by these, and then sets its state.
_ALLOWED: Final = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def read_pickled_batch(path: str | Path, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Do what `read_binary_batch` does, for a file of the Python version."""
    try:
        with Path(path).open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"]).reshape(rows, *SHAPE)
        labels = np.array(batch[b"labels"], np.int64)
        if images.dtype != np.uint8 or labels.shape != (rows,):
            raise ValueError(f"data must be bytes, and labels {rows} numbers")
        if not 0 <= labels.min() <= labels.max() < CLASSES:
            raise ValueError(f"labels must lie in 0..{CLASSES - 1}")
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise errors of many types
        reason = f"is not a file of CIFAR-10's Python version: {error}"
        raise MalformedFile(Path(path), None, reason) from error
    return images, labels


def _find(folder: Path) -> Path:
    for found in (folder / name for name in _FOLDERS):
        if any((found / f"{TEST[0]}{ending}").is_file() for ending in (".bin", "")):
            return found
    raise FileNotFoundError(
        f"no CIFAR-10 in '{folder}': neither test_batch.bin and data_batch_1.bin to 5.bin (binary "
        "version) nor test_batch and data_batch_1 to 5 (Python version); "
        "https://www.cs.toronto.edu/~kriz/cifar.html has both"
    )


def _ending(folder: Path) -> str:
    return ".bin" if (folder / f"{TEST[0]}.bin").is_file() else ""


def _read_files(paths: list[Path], rows: int) -> tuple[np.ndarray, np.ndarray]:
    parts = [
        (read_binary_batch if path.suffix == ".bin" else read_pickled_batch)(path, rows)
        for path in paths
    ]
    images = np.concatenate([images for images, _ in parts])
    return images, np.concatenate([labels for _, labels in parts])
