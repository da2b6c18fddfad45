"""The network for digits takes small images and large ones, and learns the real ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.data.digit_images import load_digit_images
from models.digits_cnn import digits_cnn


@pytest.mark.parametrize(("size", "parameters"), [(8, 22_602), (28, 206_922)])
def test_digits_cnn_size_follows_the_image_size(size: int, parameters: int) -> None:
    model = digits_cnn(size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(3, 1, size, size)).shape == (3, 10)


def test_image_size_not_a_multiple_of_4_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be a multiple of 4, got 6"):
        digits_cnn(6)


def test_digits_cnn_learns_in_one_epoch() -> None:
    torch.manual_seed(0)
    data, model = load_digit_images(), digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = data.train.tensors
    for batch in torch.randperm(len(images)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    images, labels = data.test.tensors
    assert (model(images).argmax(1) == labels).float().mean() > 0.7  # chance: 0.1
