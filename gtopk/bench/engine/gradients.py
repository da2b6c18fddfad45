"""Gradients to reduce: as many and as large as a network's."""

from __future__ import annotations

from typing import Final

# Of a bottleneck block: its width, and how many of them follow each other.
_STAGES: Final = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet50() -> list[int]:
    """Return the lengths of ResNet-50's 161 parameters, 25,557,032 in all (He et al. 2015)."""
    lengths = [3 * 64 * 7 * 7, 64, 64]
    channels = 64
    for width, blocks in _STAGES:
        wide = 4 * width
        for block in range(blocks):
            lengths += [channels * width, width, width]
            lengths += [9 * width * width, width, width]
            lengths += [width * wide, wide, wide]
            if block == 0:
                lengths += [channels * wide, wide, wide]
            channels = wide
    return [*lengths, 1000 * channels, 1000]


def small() -> list[int]:
    """Return the lengths of as many small parameters."""
    return [1000] * len(resnet50())
