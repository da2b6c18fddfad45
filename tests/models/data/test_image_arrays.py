"""Augmentation shifts and mirrors whole images, and depends only on the visits."""

from __future__ import annotations

import numpy as np
import torch

from models.data.image_arrays import PADDING, ImageArrays, augment


def test_augmentation_shifts_and_mirrors_every_image() -> None:
    images = np.random.default_rng(0).integers(1, 256, (40, 3, 8, 6), np.uint8)
    found = augment(images, np.random.default_rng(1))
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    seen = set()
    for before, after in zip(padded, found, strict=True):
        ways = [
            (down, right, mirrored)
            for down in range(2 * PADDING + 1)
            for right in range(2 * PADDING + 1)
            for mirrored in (False, True)
            if np.array_equal(
                before[:, down : down + 8, right : right + 6][:, :, :: -1 if mirrored else 1], after
            )
        ]
        assert len(ways) == 1
        seen.add(ways[0])
    assert {mirrored for _, _, mirrored in seen} == {False, True}
    assert len(seen) > 30


def test_augmentation_is_determined_by_the_visit_number() -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 3, 8, 8), np.uint8)
    data = ImageArrays(images, np.arange(10), (0.5,) * 3, (0.2,) * 3, augmented=True, seed=3)
    first, again, next_epoch = (data.__getitems__(visits).inputs for visits in ([4], [4], [14]))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_epoch)
    plain = ImageArrays(images, np.arange(10), (0.5,) * 3, (0.2,) * 3)
    assert torch.equal(plain[4].inputs, plain[14].inputs)
    assert plain[14].targets.tolist() == [4]
