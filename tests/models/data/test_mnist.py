"""MNIST's files, plain or gzip: read, or refused with file, byte and reason."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from models.data.malformed import MalformedFile
from models.data.mnist import read_idx, read_mnist
from tests.published_files import idx

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2], np.uint8)


def write_set(folder: Path) -> None:
    for part, pack, ending in (("train", bytes, ""), ("t10k", gzip.compress, ".gz")):
        (folder / f"{part}-images-idx3-ubyte{ending}").write_bytes(pack(idx(IMAGES)))
        (folder / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(LABELS)))


def test_mnist_plain_and_gzip_files_are_read(tmp_path) -> None:
    write_set(tmp_path)
    data = read_mnist(tmp_path)
    for part in (data.train, data.test):
        batch = part.__getitems__([2, 9])  # the second is the first, an epoch later
        assert batch.inputs.shape == (2, 1, 28, 28)
        assert torch.equal(batch.inputs[0], batch.inputs[1])
        expected = (torch.from_numpy(IMAGES[2]) / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(batch.inputs[0, 0], expected)
        assert batch.targets.tolist() == [4, 4]


def test_incomplete_or_inconsistent_mnist_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no train-images-idx3-ubyte or .*\.gz in"):
        read_mnist(tmp_path)
    write_set(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(LABELS[:-1]))
    with pytest.raises(MalformedFile, match=r"has 6 labels where .* has 7 images"):
        read_mnist(tmp_path)
    labels.write_bytes(idx(np.where(LABELS == 5, 10, LABELS).astype(np.uint8)))
    with pytest.raises(MalformedFile, match=r"byte 12: label 10 must lie in 0\.\.9"):
        read_mnist(tmp_path)


def test_mnist_test_images_of_another_size_are_refused(tmp_path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES[:, :27]))
    with pytest.raises(MalformedFile, match=r"27 x 28 pixels where those of .* have 28 x 28"):
        read_mnist(tmp_path)


def test_idx_file_with_bad_header_or_length_is_refused(tmp_path) -> None:
    intact = idx(LABELS)
    packed = gzip.compress(intact)
    cases = {
        b"": "is damaged, or ends too soon",
        intact[:6]: "is damaged, or ends too soon",
        intact[:-1]: r"holds 6 bytes where its sizes are \(7,\)",
        intact + b"\0": r"holds 8 bytes where its sizes are \(7,\)",
        b"\0\0\x0d\x01" + intact[4:]: "must begin with 00000801: bytes in 1 dimensions",
        idx(IMAGES): "must begin with 00000801",
        struct.pack(">HBBI", 0, 8, 1, 0): r"holds 0 bytes where its sizes are \(0,\)",
    }
    packed_cases = {
        packed[:-9]: "is damaged, or ends too soon",
        packed[:12] + b"\xff" + packed[13:]: "",
        intact: "is damaged, or ends too soon: Not a gzipped file",
        gzip.compress(intact[:-1]): "holds 6 bytes where",
    }
    for name, contents in (("idx", cases), ("idx.gz", packed_cases)):
        for content, reason in contents.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(MalformedFile, match=f"{name}: .*{reason}"):
                read_idx(tmp_path / name, 1)
    (tmp_path / "idx.gz").write_bytes(packed)
    assert read_idx(tmp_path / "idx.gz", 1).tolist() == LABELS.tolist()
