"""Folders of images, laid out like ImageNet: a folder of JPEG or PNG files for each class.

    folder/train/n01440764/n01440764_10026.JPEG        classes are numbered in the order of their
    folder/val/n01440764/ILSVRC2012_val_00000293.JPEG  names, and train and val have the same

Images are decoded when their batch is made. For training they are cropped at random (Szegedy et al.
2015), for testing from the middle. Only this module needs Pillow: pip install pillow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from .labelled import LabelledBatch, LabelledData, LabelledSet
from .malformed import MalformedFile

MEAN: Final = np.array((0.485, 0.456, 0.406), np.float32)  # of red, green, blue, from 0 to 1
DEVIATION: Final = np.array((0.229, 0.224, 0.225), np.float32)
ENDINGS: Final = (".jpeg", ".jpg", ".png")
FORMATS: Final = ("JPEG", "PNG")
MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of 8 bits at most
MOST_PIXELS: Final = 64 << 20  # in an image, before cropping
_TESTED_SHARE: Final = 224 / 256  # of the shorter side
_AREAS: Final = (0.08, 1.0)  # of a random crop, relative to the image
_RATIOS: Final = (3 / 4, 4 / 3)  # of a random crop's width to its height
_TRIES: Final = 10


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: float
    upper: float
    right: float
    lower: float


Cut = Callable[[int, int], Box]


class FolderImages(LabelledSet):
    """The images of training or of validation. size: of the images in batches, in pixels."""

    def __init__(
        self, folder: Path, classes: Sequence[str], size: int, *, augmented: bool, seed: int = 0
    ) -> None:
        self.paths: list[Path] = []
        labels: list[int] = []
        for number, name in enumerate(classes):
            found = _images_in(folder / name)
            self.paths += found
            labels += [number] * len(found)
        self.labels = np.array(labels, np.int64)
        self.size, self.augmented, self.seed = size, augmented, seed

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, visits: Sequence[int]) -> LabelledBatch:
        """Return a batch; raise MalformedFile for a file that is not an image."""
        numbers = [visit % len(self) for visit in visits]
        images = np.stack([self._image(visit) for visit in visits])
        inputs = (images.astype(np.float32) / 255 - MEAN) / DEVIATION
        return LabelledBatch(
            torch.from_numpy(np.ascontiguousarray(inputs.transpose(0, 3, 1, 2))),
            torch.from_numpy(self.labels[numbers]),
        )

    def _image(self, visit: int) -> np.ndarray:
        path = self.paths[visit % len(self)]
        if not self.augmented:
            return decoded(path, self.size, central_box)
        random = np.random.default_rng([self.seed, visit])
        image = decoded(path, self.size, lambda width, height: random_box(width, height, random))
        return image[:, ::-1] if random.random() < 0.5 else image


def read_image_folder(
    folder: str | Path, *, size: int = 224, seed: int = 0, name: str = "ImageNet"
) -> LabelledData:
    """Return the images in folder/train and folder/val, float32 [n, 3, size, size] in batches.

    Raises FileNotFoundError for a folder that is missing or empty, ValueError if training and
    validation have different classes, ImportError without Pillow.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("folders of images need Pillow: pip install pillow") from error
    train, val = (Path(folder) / part for part in ("train", "val"))
    classes = _classes_in(train)
    if (others := _classes_in(val)) != classes:
        unmatched = sorted(set(classes) ^ set(others))
        raise ValueError(
            f"'{train}' and '{val}' must have the same folders, one for each class; only one of "
            f"them has {', '.join(unmatched[:5])}{' ...' if len(unmatched) > 5 else ''}"
        )
    return LabelledData(
        FolderImages(train, classes, size, augmented=True, seed=seed),
        FolderImages(val, classes, size, augmented=False),
        len(classes),
        name,
    )


def central_box(width: int, height: int) -> Box:
    """Return the square in the middle, of 7/8 of the shorter side."""
    side = min(width, height) * _TESTED_SHARE
    left, upper = (width - side) / 2, (height - side) / 2
    return Box(left, upper, left + side, upper + side)


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """Return a box of random place, area and shape; if none fits, the largest allowed one."""
    low, high = _RATIOS
    for _ in range(_TRIES):
        area = width * height * random.uniform(*_AREAS)
        ratio = math.exp(random.uniform(math.log(low), math.log(high)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = int(random.integers(0, width - across + 1))
            upper = int(random.integers(0, height - down + 1))
            return Box(left, upper, left + across, upper + down)
    across, down = min(width, round(height * high)), min(height, round(width / low))
    left, upper = (width - across) // 2, (height - down) // 2
    return Box(left, upper, left + across, upper + down)


def decoded(path: Path, size: int, cut: Cut) -> np.ndarray:
    """Return a part of an image, uint8 [size, size, 3].

    cut: chooses the part from width and height.
    Raises MalformedFile for a file that is not JPEG or PNG, is damaged, larger than MOST_PIXELS, or
    of another mode than MODES.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS}")
            if image.mode not in MODES:  # Pillow would clip values above 255
                allowed = ", ".join(MODES)
                raise ValueError(
                    f"mode {image.mode} is not one of {allowed}; convert the image to 8 bits"
                )
            part = image.convert("RGB").resize(
                (size, size), Image.Resampling.BILINEAR, cut(width, height), reducing_gap=2.0
            )
    except Exception as error:  # Pillow raises errors of many types for damaged files
        raise MalformedFile(path, None, f"is not a readable JPEG or PNG: {error}") from error
    return np.asarray(part)


def _classes_in(folder: Path) -> list[str]:
    """Return the folders' names; raise MalformedFile for an image beside them, without a class."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [path.name for path in paths if path.is_dir()]
    if not names:
        raise FileNotFoundError(f"'{folder}' must be a folder with a folder of images per class")
    for path in paths:
        if path.suffix.lower() in ENDINGS and not path.is_dir():
            raise MalformedFile(path, None, "must lie in the folder of its class")
    return names


def _images_in(folder: Path) -> list[Path]:
    """Return the images of a class; raise MalformedFile for any other file."""
    paths = sorted(folder.iterdir())
    for path in paths:
        if path.suffix.lower() not in ENDINGS:
            raise MalformedFile(path, None, f"must end in one of {', '.join(ENDINGS)}")
        if path.name.startswith("."):  # such as macOS's metadata, ._photo.jpg
            raise MalformedFile(path, None, "is a hidden file, not an image: remove it")
        if not path.is_file():
            raise MalformedFile(path, None, "is not a file, or is a broken link")
    if not paths:
        raise FileNotFoundError(f"'{folder}' must hold images of its class, and is empty")
    return paths
