"""Classification data by name or by path: inputs and labels, split into training and test."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

TEST_SHARE = 0.2
BUNDLED: Final = ("digits", "breast-cancer", "wine")  # with scikit-learn
MOST_BYTES: Final = 16 << 30  # in an array, as a small compressed file may announce any number
MOST_CLASSES: Final = 1000  # or the number of rows, if that is larger

_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Classification(NamedTuple):
    """A data set of float32 inputs [n, features] and int64 labels [n]."""

    train: TensorDataset
    test: TensorDataset
    features: int
    classes: int


def load(dataset: str, seed: int = 0) -> Classification:
    """Return the data set: one of BUNDLED, or the path of an .npz file with arrays `x` and `y`.

    digits: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to -0.5..0.5.
    breast-cancer, wine: its 569 tumours of 30 and 178 wines of 13 features, 2 and 3 classes, each
        feature of mean 0 and deviation 1 over the training samples.
    seed:   chooses the fifth of the samples held out for testing; must be equal on all ranks.
    Raises FileNotFoundError or ValueError with advice, ImportError without scikit-learn.
    """
    x, y = _bundled(dataset) if dataset in BUNDLED else _npz(Path(dataset))
    order = np.random.default_rng(seed).permutation(len(x))
    tested = round(len(x) * TEST_SHARE)
    if not tested:
        raise ValueError(f"'{dataset}' must hold at least 3 samples to test on a fifth of them")
    x, y = x[order], y[order]
    if dataset in BUNDLED and dataset != "digits":
        x = (x - x[tested:].mean(0)) / x[tested:].std(0)
    inputs, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)
    return Classification(
        train=TensorDataset(inputs[tested:], labels[tested:]),
        test=TensorDataset(inputs[:tested], labels[:tested]),
        features=x.shape[1],
        classes=int(y.max()) + 1,
    )


def _bundled(name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            f"dataset '{name}' needs scikit-learn: pip install scikit-learn"
        ) from error
    x, y = getattr(datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    return (x / 16 - 0.5 if name == "digits" else x).astype(np.float64), y.astype(np.int64)


def _npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if not path.exists():
        raise FileNotFoundError(
            f"no data set at '{path}': give {', '.join(map(repr, BUNDLED))}, or the path of an "
            ".npz file with arrays x [n, ...] and y [n]"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            x, y = (_array(archive, f"{name}.npy") for name in ("x", "y"))
    except Exception as error:  # NumPy and zipfile raise errors of many types for damaged files
        raise ValueError(f"'{path}' is not an .npz file with arrays x and y: {error}") from error
    if not x.ndim or not x.size or x.dtype.kind not in "biuf":
        inputs = None
    else:
        with np.errstate(over="ignore"):
            inputs = x.reshape(len(x), -1).astype(np.float32)
    if inputs is None or not np.isfinite(inputs).all():
        raise ValueError(
            f"'{path}': x must hold a row of finite numbers for each sample, got x of "
            f"shape {x.shape}, {x.dtype}"
        )
    labels = y.astype(np.int64) if y.dtype.kind in "iu" else None
    if labels is None or y.shape != x.shape[:1] or labels.min() < 0:
        raise ValueError(
            f"'{path}': y must hold one class number (0, 1, ...) for each row of x, got x of shape "
            f"{x.shape} and y of shape {y.shape}, {y.dtype}"
        )
    if (largest := int(labels.max())) >= (most := max(len(labels), MOST_CLASSES)):
        raise ValueError(
            f"'{path}': y must number the classes 0, 1, ..., below {most} for {len(labels)} rows, "
            f"got {largest}"
        )
    return inputs, labels


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of numbers, after checking that the file is as long as its header says.

    Otherwise a file of a few bytes could allocate any amount of memory.
    """
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"{name} is of NumPy's format {version}")
        shape, _, dtype = _HEADERS[version](member)
        declared_bytes = math.prod(shape) * dtype.itemsize
        actual_bytes = archive.getinfo(name).file_size - member.tell()
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which only a pickle could carry")
        if min(shape, default=0) < 0 or declared_bytes != actual_bytes:
            raise ValueError(f"{name} declares {shape} of {dtype}, but holds {actual_bytes} bytes")
        if actual_bytes > MOST_BYTES:
            raise ValueError(f"{name} has {actual_bytes} bytes; at most {MOST_BYTES} are read")
    with archive.open(name) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
    return array
