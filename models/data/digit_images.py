"""scikit-learn's handwritten digits as images, in their own size or enlarged to CIFAR's shape.

Real images for convolutional networks, without a download.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.utils.data import TensorDataset

from .classification import Classification, load


def load_digit_images(size: int = 8, channels: int = 1, seed: int = 0) -> Classification:
    """Return the digits as float32 [n, channels, size, size], split as `load("digits", seed)` does.

    size: unless 8, images are interpolated bilinearly; channels: equal copies of the image.
    """
    data = load("digits", seed)

    def images(part: TensorDataset) -> TensorDataset:
        flat, labels = part.tensors
        x = flat.view(-1, 1, 8, 8)
        if size != 8:
            x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
        return TensorDataset(x.repeat(1, channels, 1, 1), labels)

    return Classification(images(data.train), images(data.test), channels * size**2, data.classes)
