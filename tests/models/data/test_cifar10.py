"""CIFAR-10's two versions have the same images; errors name the file and the place."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from models.data.cifar10 import (
    DEVIATION,
    IMAGE_BYTES,
    MEAN,
    TEST,
    TRAIN,
    read_binary_batch,
    read_cifar10,
    read_pickled_batch,
)
from models.data.malformed import MalformedFile
from tests.published_files import binary_batch, pickled_batch

ROWS = 4


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (ROWS, 3, 32, 32), np.uint8)
    return images, random.integers(0, 10, ROWS)


def write_set(folder: Path, *, binary: bool) -> None:
    folder.mkdir()
    for number, name in enumerate((*TRAIN, *TEST)):
        written = (binary_batch if binary else pickled_batch)(*batch(number))
        (folder / f"{name}{'.bin' if binary else ''}").write_bytes(written)


def test_cifar10_binary_and_python_versions_read_alike(tmp_path) -> None:
    write_set(tmp_path / "cifar-10-batches-bin", binary=True)
    write_set(tmp_path / "python", binary=False)
    by_version = [read_cifar10(tmp_path / name, rows=ROWS) for name in (".", "python")]
    for data in by_version:
        assert (len(data.train), len(data.test), data.classes) == (5 * ROWS, ROWS, 10)
        assert data.origin == "CIFAR-10"
        images, labels = batch(5)
        found = data.test.__getitems__(range(ROWS))
        mean, deviation = (torch.tensor(each)[:, None, None] for each in (MEAN, DEVIATION))
        torch.testing.assert_close(
            found.inputs, (torch.from_numpy(images) / 255 - mean) / deviation
        )
        assert found.targets.tolist() == labels.tolist()
        assert (
            data.train.labels.tolist() == np.concatenate([batch(i)[1] for i in range(5)]).tolist()
        )
        assert np.array_equal(data.train.images[ROWS : 2 * ROWS], batch(1)[0])


def test_missing_cifar10_files_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no CIFAR-10 in .*test_batch\.bin .*has both"):
        read_cifar10(tmp_path)
    write_set(tmp_path / "bin", binary=True)
    (tmp_path / "bin" / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin"):
        read_cifar10(tmp_path / "bin", rows=ROWS)


def test_cifar10_binary_file_with_wrong_length_or_label_is_refused(tmp_path) -> None:
    path, intact = tmp_path / "batch.bin", binary_batch(*batch(0))
    path.write_bytes(intact[:-1])
    with pytest.raises(MalformedFile, match=rf"must hold {ROWS} .* has {len(intact) - 1} bytes"):
        read_binary_batch(path, ROWS)
    path.write_bytes(intact + b"\0")
    with pytest.raises(MalformedFile, match=rf"must hold {ROWS} .* has {len(intact) + 1} bytes"):
        read_binary_batch(path, ROWS)
    row = 2 * (1 + IMAGE_BYTES)
    path.write_bytes(intact[:row] + b"\x0a" + intact[row + 1 :])
    with pytest.raises(MalformedFile, match=rf"byte {row}: label 10 of image 2 must lie in 0\.\.9"):
        read_binary_batch(path, ROWS)


class ForbiddenCall:
    """Pickled as a call that fails the test, as in a hostile pickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("a pickle was run",))


def test_cifar10_pickle_loads_arrays_and_calls_nothing_else(tmp_path) -> None:
    images, labels = batch(0)
    path = tmp_path / "data_batch_1"
    content = pickled_batch(images, labels)
    path.write_bytes(content)
    read, found = read_pickled_batch(path, ROWS)
    assert np.array_equal(read, images)
    assert found.tolist() == labels.tolist()
    first_label = content.index(b"]q") + 4
    cases = {
        pickle.dumps({b"labels": labels.tolist(), b"data": ForbiddenCall()}, 2): "it would call ",
        content.replace(b"_reconstruct", b"scalar"): "would call numpy.core.multiarray.scalar",
        content.replace(b"U\x02u1", b"U\x02i1"): "data must be bytes, and labels 4 numbers",
        content.replace(b"K\x04M\x00\x0c", b"K\x05M\x00\x0c"): "",
        content.replace(b"labels", b"labelz"): "b'labels'",
        content[:-1]: "",
        content[:500]: "",
        b"": "",
        b"\x80\x02\xff": "",
        content[:first_label] + b"K\x0a" + content[first_label + 2 :]: "must lie in 0..9",
    }
    for changed, reason in cases.items():
        assert changed != content
        path.write_bytes(changed)
        with pytest.raises(MalformedFile, match="data_batch_1: is not a file of CIFAR") as caught:
            read_pickled_batch(path, ROWS)
        assert reason in str(caught.value)
