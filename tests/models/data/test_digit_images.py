"""Digits as images, in their own size or enlarged."""

from __future__ import annotations

import torch

from models.data import load
from models.data.digit_images import load_digit_images


def test_small_digit_images_are_the_rows_of_the_table() -> None:
    images, table = load_digit_images(seed=3), load("digits", seed=3)
    for part, flat in zip(images[:2], table[:2], strict=True):
        assert torch.equal(part.tensors[0].flatten(1), flat.tensors[0])
        assert torch.equal(part.tensors[1], flat.tensors[1])


def test_enlarged_digit_images_keep_their_brightness() -> None:
    large = load_digit_images(size=32, channels=3)
    x = large.train.tensors[0]
    assert x.shape[1:] == (3, 32, 32)
    assert large.features == 3 * 32 * 32
    assert torch.equal(x[:, 0], x[:, 2])
    small = load_digit_images().train.tensors[0]
    torch.testing.assert_close(x.mean((1, 2, 3)), small.mean((1, 2, 3)), atol=0.02, rtol=0)
