"""MNIST's files, plain or gzip: read as they are, or refused by file, byte and reason."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from models.data.idx import MOST_BYTES, read_idx
from models.data.malformed import MalformedFile
from models.data.mnist import read_mnist
from tests.published_files import idx

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2], np.uint8)


def write_set(folder: Path) -> None:
    for part, pack, ending in (("train", bytes, ""), ("t10k", gzip.compress, ".gz")):
        (folder / f"{part}-images-idx3-ubyte{ending}").write_bytes(pack(idx(IMAGES)))
        (folder / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(LABELS)))


def test_plain_and_packed_files_are_read(tmp_path) -> None:
    write_set(tmp_path)
    data = read_mnist(tmp_path)
    for part in (data.train, data.test):
        batch = part.__getitems__([2, 9])  # the second is the first, an epoch later
        assert batch.inputs.shape == (2, 1, 28, 28)
        assert torch.equal(batch.inputs[0], batch.inputs[1])
        expected = (torch.from_numpy(IMAGES[2]) / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(batch.inputs[0, 0], expected)
        assert batch.targets.tolist() == [4, 4]


def test_a_set_that_is_not_whole_is_refused(tmp_path) -> None:
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


def test_images_to_train_and_to_test_with_are_of_one_size(tmp_path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES[:, :27]))
    with pytest.raises(MalformedFile, match=r"27 x 28 pixels where those of .* have 28 x 28"):
        read_mnist(tmp_path)


def test_an_idx_file_says_what_it_is_and_ends_there(tmp_path) -> None:
    path, whole = tmp_path / "idx", idx(LABELS)
    packed = gzip.compress(whole)
    huge = struct.pack(">HBBI", 0, 8, 1, 2**32 - 1)
    large = struct.pack(">HBBI", 0, 8, 1, MOST_BYTES)
    cases = {
        b"": "is empty",
        gzip.compress(b""): "is empty",
        lzma.compress(whole[:-1]): "ends after 6 of the 7 bytes of sizes (7,)",
        lzma.compress(whole)[:-9]: "the xz file is truncated or damaged",
        b"PK\3\4" + whole: "is a zip archive: unpack it first (unzip idx)",
        whole[:6]: "byte 4: has 6 bytes where the sizes should end at 8",
        whole[:-1]: r"byte 8: has 14 bytes where sizes (7,) should end at 15",
        whole + b"\0": "byte 15: the file must end here",
        b"\0\0\x0d\x01" + whole[4:]: "must begin with 00000801, bytes in 1 dimensions, got",
        idx(IMAGES): "got 00000803",
        struct.pack(">HBBI", 0, 8, 1, 0): "sizes (0,) are 0 bytes",
        huge: "sizes (4294967295,) are 4294967295 bytes; 1..2147483648 are read",
        large: "has 8 bytes where sizes (2147483648,) should end",
        packed[:-9]: "the gzip file is truncated or damaged",
        gzip.compress(whole[:-1]): "ends after 6 of the 7 bytes of sizes (7,)",
        gzip.compress(large): "ends after 0 of the 2147483648 bytes",
    }
    for content, reason in cases.items():
        path.write_bytes(content)
        with pytest.raises(MalformedFile) as caught:
            read_idx(path, 1)
        assert reason in str(caught.value)
        assert str(path) in str(caught.value)
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        path.write_bytes(pack(whole))
        assert read_idx(path, 1).tolist() == LABELS.tolist()


def test_what_a_packed_file_announces_is_no_reason_to_make_room_for_it(tmp_path):
    path = tmp_path / "images.gz"
    announced = struct.pack(">HBB3I", 0, 8, 3, 1 << 15, 1 << 8, 1 << 8)  # 2 GiB
    path.write_bytes(gzip.compress(announced + bytes(1000)))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile, match=r"ends after 1000 of the 2147483648 bytes"):
            read_idx(path, 3)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1 << 26
