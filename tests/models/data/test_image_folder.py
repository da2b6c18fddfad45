"""Folders of images: classes by name, crops inside the image, errors that name the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.data import image_folder
from models.data.image_folder import central_box, decoded, random_box, read_image_folder
from models.data.malformed import MalformedFile
from tests.published_files import image


def write_folder(folder: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for level, name in enumerate(("n01", "n02")):
            (folder / part / name).mkdir(parents=True)
            for number, (ending, kind) in enumerate(((".JPEG", "JPEG"), (".png", "PNG"))):
                pixels = random.integers(0, 20, (40 + number, 50, 3), np.uint8) + 100 * level
                (folder / part / name / f"{number}{ending}").write_bytes(
                    image(pixels.astype(np.uint8), kind)
                )


def test_image_folder_numbers_classes_by_name_and_crops_images(tmp_path) -> None:
    write_folder(tmp_path)
    data = read_image_folder(tmp_path, size=16)
    assert (len(data.train), len(data.test), data.classes, data.origin) == (4, 4, 2, "ImageNet")
    for part in (data.train, data.test):
        batch = part.__getitems__([0, 1, 2, 7])
        assert batch.inputs.shape == (4, 3, 16, 16)
        assert batch.inputs.dtype == torch.float32
        assert batch.targets.tolist() == [0, 0, 1, 1]
        dark, light = batch.inputs[:2].mean(), batch.inputs[2:].mean()
        assert 1.2 < light - dark < 2.2  # 100 of 255 levels, over deviations of about 0.226
    once, again, later = (data.train.__getitems__([v]).inputs for v in (3, 3, 7))
    assert torch.equal(once, again)
    assert not torch.equal(once, later), "another visit cuts another part"
    assert torch.equal(data.test[3].inputs, data.test[7].inputs)


def test_crops_lie_inside_the_image_with_published_areas_and_ratios() -> None:
    assert central_box(256, 256) == (16, 16, 240, 240)
    assert central_box(400, 256) == (88, 16, 312, 240)
    random = np.random.default_rng(0)
    for width, height in ((100, 80), (33, 200), (1, 50), (1, 1)):
        for _ in range(100):
            left, upper, right, lower = random_box(width, height, random)
            assert 0 <= left < right <= width
            assert 0 <= upper < lower <= height
            if (width, height) == (100, 80):
                area = (right - left) * (lower - upper) / (width * height)
                assert 0.07 < area <= 1
                assert 0.7 < (right - left) / (lower - upper) < 1.4


def test_unreadable_or_oversized_image_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.png"
    intact = image(np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8))
    for content in (
        b"",
        b"text",
        intact[:40],
        intact[:-99],
        image(np.zeros((9, 9, 3), np.uint8), "GIF"),
    ):
        path.write_bytes(content)
        with pytest.raises(MalformedFile, match=r"a\.png: is not a readable JPEG or PNG"):
            decoded(path, 4, central_box)
    path.write_bytes(intact)
    monkeypatch.setattr(image_folder, "MOST_PIXELS", 80)
    with pytest.raises(MalformedFile, match="9 x 9 pixels are more than 80"):
        decoded(path, 4, central_box)


def test_sixteen_bit_grey_image_is_refused(tmp_path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray((np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)).save(path)
    with pytest.raises(
        MalformedFile, match=r"a\.png: .* mode I(;16)? is not one of 1, L, .* 8 bits"
    ):
        decoded(path, 4, central_box)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_eight_bit_images_of_any_mode_are_read(tmp_path, mode) -> None:
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(path)
    assert decoded(path, 4, central_box).min() > 250


def test_incomplete_image_folder_error_names_what_is_missing(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="train' must be a folder with a folder of images"):
        read_image_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "val" / "n03").mkdir()
    with pytest.raises(ValueError, match=r"must have the same folders.* only one of them has n03"):
        read_image_folder(tmp_path)
    (tmp_path / "train" / "n03").mkdir()
    with pytest.raises(FileNotFoundError, match="n03' must hold images of its class, and is empty"):
        read_image_folder(tmp_path)
    (tmp_path / "train" / "n03" / "notes.txt").touch()
    with pytest.raises(MalformedFile, match=r"notes\.txt: must end in one of \.jpeg, \.jpg, \.png"):
        read_image_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("._0.jpg", "is a hidden file"), ("gone.png", "is not a file, or is a broken link")],
)
def test_hidden_file_or_broken_link_in_a_class_folder_is_refused(tmp_path, name, reason) -> None:
    write_folder(tmp_path)
    stray = tmp_path / "train" / "n01" / name
    if name == "gone.png":
        stray.symlink_to(tmp_path / "nowhere")
    else:
        stray.write_bytes(b"\0\5\x16\7")
    with pytest.raises(MalformedFile, match=reason) as caught:
        read_image_folder(tmp_path, size=16)
    assert str(stray) in str(caught.value)


def test_image_outside_the_class_folders_is_refused_but_not_other_files(tmp_path) -> None:
    write_folder(tmp_path)
    (tmp_path / "val" / "labels.txt").touch()
    read_image_folder(tmp_path)
    (tmp_path / "val" / "ILSVRC2012_val_00000293.JPEG").touch()
    with pytest.raises(MalformedFile, match=r"293\.JPEG: must lie in the folder of its class"):
        read_image_folder(tmp_path)
