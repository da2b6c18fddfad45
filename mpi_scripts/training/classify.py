"""Classification of images, or of rows of a table, into one class each; measured by accuracy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from models.data import load
from models.data.cifar10 import read_cifar10
from models.data.digit_images import load_digit_images
from models.data.image_folder import read_image_folder
from models.data.labelled import LabelledBatch, LabelledData, labelled
from models.data.mnist import read_mnist
from models.data.synthetic_images import CIFAR10, IMAGENET, ImageShape, synthesise_images

from .task import Feed, Loading, Sizes, Source, Task, moved, parts, share

EVALUATED_AT_ONCE = 256  # samples


class Classify(Task[LabelledBatch]):
    """A task of labelled samples, scored by its accuracy."""

    def __init__(self, data: LabelledData, feed: Feed) -> None:
        self.data, self.feed, self.origin = data, feed, data.origin
        self._loading: Loading[LabelledBatch] = Loading(data.train, feed)
        self.batches_per_epoch = len(self._loading)
        self.sizes = Sizes(data.train[0].inputs[0].numel(), data.classes)

    def batches(self, epoch: int, first: int) -> Iterator[LabelledBatch]:
        return self._loading.batches(epoch, first)

    def loss(self, model: torch.nn.Module, batch: LabelledBatch) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs), batch.targets)

    def count(self, model: torch.nn.Module, device: torch.device) -> list[float]:
        """Return the number of correct samples, and of all samples."""
        own, right = share(len(self.data.test), self.feed), 0
        for numbers in parts(own, EVALUATED_AT_ONCE):
            batch = moved(self.data.test.__getitems__(numbers), device)
            right += int((model(batch.inputs).argmax(1) == batch.targets).sum())
        return [right, len(own)]

    def scores(self, totals: list[float]) -> dict[str, float]:
        right, samples = totals
        return {"accuracy": right / samples}


def open_table(source: Source, feed: Feed) -> Classify:
    """Return the digits as rows, or the data in an .npz file."""
    return Classify(labelled(load(source.name, source.seed), source.name), feed)


def open_digits(source: Source, feed: Feed) -> Classify:
    """Return the digits as images; with a folder, MNIST's."""
    if source.folder is not None:
        return Classify(read_mnist(source.folder), feed)
    return Classify(labelled(load_digit_images(seed=source.seed), "digits"), feed)


def open_cifar10(source: Source, feed: Feed) -> Classify:
    """Return CIFAR-10, or synthetic data instead."""
    if source.folder is not None:
        return Classify(read_cifar10(source.folder, seed=source.seed), feed)
    return _synthetic(CIFAR10, source, feed)


def open_imagenet(source: Source, feed: Feed) -> Classify:
    """Return a folder of images, or synthetic data instead of ImageNet."""
    if source.folder is not None:
        return Classify(read_image_folder(source.folder, seed=source.seed), feed)
    return _synthetic(IMAGENET, source, feed)


def _synthetic(shape: ImageShape, source: Source, feed: Feed) -> Classify:
    return Classify(synthesise_images(shape, source.samples, source.seed), feed)
