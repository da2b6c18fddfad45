"""Layers: the shapes of the published networks' parameters, which decide what PowerSGD can save.

A layer's shapes come weight first, then its biases and its batch norm's: their gradients are there
together, when backward has passed the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

Shape = tuple[int, ...]
Layer = tuple[Shape, ...]

# Dimensions up to this are colours, kernels and classes: in thinner networks, too.
_FIXED: Final = 12


def thinner(layers: list[Layer], scale: float) -> list[Layer]:
    """Return the layers of a network of about 1/scale of the parameters: narrower, not shorter."""

    def narrow(width: int) -> int:
        return width if width <= _FIXED else max(1, round(width / math.sqrt(scale)))

    return [tuple(tuple(map(narrow, shape)) for shape in layer) for layer in layers]


def _convolution(inputs: int, outputs: int, kernel: int, *, biased: bool, normed: bool) -> Layer:
    vectors = biased + 2 * normed
    return ((outputs, inputs, kernel, kernel), *[(outputs,)] * vectors)


def _linear(inputs: int, outputs: int) -> Layer:
    return ((outputs, inputs), (outputs,))


def _vgg16() -> Iterator[Layer]:
    inputs = 3
    for outputs in (64, 64, 128, 128, *[256] * 3, *[512] * 6):
        yield _convolution(inputs, outputs, 3, biased=True, normed=True)
        inputs = outputs
    yield _linear(inputs, 10)


def _resnet20() -> Iterator[Layer]:
    inputs = 3
    for outputs in (*[16] * 7, *[32] * 6, *[64] * 6):
        yield _convolution(inputs, outputs, 3, biased=False, normed=True)
        inputs = outputs
    yield _linear(inputs, 10)


def _alexnet() -> Iterator[Layer]:
    inputs = 3
    for outputs, kernel in ((64, 11), (192, 5), (384, 3), (256, 3), (256, 3)):
        yield _convolution(inputs, outputs, kernel, biased=True, normed=False)
        inputs = outputs
    yield from (_linear(256 * 6 * 6, 4096), _linear(4096, 4096), _linear(4096, 1000))


def _resnet50() -> Iterator[Layer]:
    def normed(inputs: int, outputs: int, kernel: int) -> Layer:
        return _convolution(inputs, outputs, kernel, biased=False, normed=True)

    yield normed(3, 64, 7)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            yield from (normed(inputs, width, 1), normed(width, width, 3))
            yield normed(width, 4 * width, 1)
            if block == 0:
                yield normed(inputs, 4 * width, 1)
            inputs = 4 * width
    yield _linear(inputs, 1000)


def _lstm_ptb() -> Iterator[Layer]:
    vocabulary, width = 10_000, 1500
    yield ((vocabulary, width),)
    for _ in range(2):
        yield ((4 * width, width), (4 * width, width), (4 * width,), (4 * width,))
    yield _linear(width, vocabulary)


def _gpt2() -> Iterator[Layer]:
    width = 768
    yield ((50_257, width),)
    yield ((1024, width),)
    norm = ((width,), (width,))
    for _ in range(12):
        yield (*norm, (width, 3 * width), (3 * width,), (width, width), (width,))
        yield (*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield norm


LAYERS: Final[Mapping[str, Callable[[], Iterator[Layer]]]] = {
    "vgg16": _vgg16,
    "resnet20": _resnet20,
    "alexnet": _alexnet,
    "resnet50": _resnet50,
    "lstm-ptb": _lstm_ptb,
}
# What a step costs whatever it computes depends on how many parameters there are, and how long.
SHAPES: Final[Mapping[str, Callable[[], Iterator[Layer]]]] = {
    "one-50m": lambda: iter([((50_000_000,),)]),
    "160x1000": lambda: iter([((1000,),)] * 160),
    "1000x10": lambda: iter([((10,),)] * 1000),
    "resnet50-shapes": _resnet50,
    "gpt2-shapes": _gpt2,
    "lstm-ptb-shapes": _lstm_ptb,
}
