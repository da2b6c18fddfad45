"""The published networks, with their authors' measurements on 1 and on 4 to 32 workers.

Shi et al. 2019 (ICDCS, arXiv 1901.04359): 32 nodes with one Nvidia P102-100 each, 1 Gbit/s
Ethernet, density 0.001. The figures are those of the authors' plotting script,
scripts/icdcs2019/communication.py in their repository gtopkssgd.

Emulated networks have the same layers, or thinner ones, and the published workers' speed: a step
sleeps as long as a worker's step took.

forward    |====|                      a third of the step, asleep: a GPU computes, the CPU waits
backward        |==|==|==|==|==|==|    the rest, in equal shares for the layers; a layer's gradients
                   g6 g5 g4 g3 g2 g1   are ready when its share is over, so that hooks can overlap
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from torch import nn

from gtopk.cli.bench.harness import Layer, convolution, linear, lstm_ptb, of_layers, resnet50

WORKERS: Final = (4, 8, 16, 32)
# Backward takes two products where forward takes one: for inputs and for weights.
FORWARD_SHARE: Final = 1 / 3


class Compute(NamedTuple):
    """The computation of a step.

    emulated: whether it sleeps instead of computing, with random gradients.
    scale: how many times smaller the model is than the one it stands for.
    make: returns the model; backward: its forward and backward pass of a batch.
    """

    name: str
    emulated: bool
    scale: float
    batch: int
    make: Callable[[], nn.Module]
    backward: Callable[[nn.Module], None]


class Published(NamedTuple):
    """One model's published figures.

    batch: samples per worker and step; alone: samples per second of a single worker.
    by_method: samples per second of each worker, for the numbers of workers in WORKERS.
    """

    batch: int
    alone: float
    by_method: Mapping[str, tuple[float, float, float, float]]

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a single worker's step, which only computes."""
        return self.batch / self.alone

    def efficiency(self, method: str, ranks: int) -> float | None:
        """Return the workers' speed as a share of their speed alone; None: not published."""
        if method not in self.by_method or ranks not in WORKERS:
            return None
        return self.by_method[method][WORKERS.index(ranks)] / self.alone


PUBLISHED: Final[Mapping[str, Published]] = {
    "vgg16": Published(
        128,
        1317.3,
        {
            "ssgd": (104.2, 92.6, 39.5, 12.6),
            "topk-allgather": (110.6, 109.9, 97.9, 63.0),
            "gtopk-tree": (131.1, 130.6, 126.4, 123.2),
        },
    ),
    "resnet20": Published(
        128,  # the script says 32, but its seconds per step are those of 128
        920.6,
        {
            "ssgd": (821.7, 705.2, 520.4, 287.9),
            "topk-allgather": (908.8, 753.0, 737.6, 696.0),
            "gtopk-tree": (916.3, 868.7, 808.5, 789.3),
        },
    ),
    "alexnet": Published(
        64,
        173.5,
        {
            "ssgd": (14.0, 12.1, 4.94, 1.23),
            "topk-allgather": (14.2, 13.9, 13.4, 9.24),
            "gtopk-tree": (16.5, 16.4, 16.4, 15.8),
        },
    ),
    "resnet50": Published(
        256,  # 16 times 16
        52.9,
        {
            "ssgd": (39.0, 37.0, 23.2, 10.7),
            "topk-allgather": (37.7, 35.7, 34.5, 30.6),
            "gtopk-tree": (39.8, 39.7, 39.1, 39.1),
        },
    ),
    "lstm-ptb": Published(
        # The script names no batch; this is their later paper's (IJCAI 2019). With the 20 of this
        # one, S-SGD on 4 workers would have sent its bytes faster than the link carries them.
        100,
        392.0,
        {
            "ssgd": (12.657, 8.7, 4.1, 2.1),
            "topk-allgather": (19.9, 18.6, 14.8, 5.4),
            "gtopk-tree": (17.8, 17.6, 15.1, 10.8),
        },
    ),
}


# Dimensions up to this size are colours, kernels and classes, which thinner networks keep.
_FIXED: Final = 12


def thinner(layers: list[Layer], scale: float) -> list[Layer]:
    """Return the layers of a network with about 1/scale of the parameters: narrower, same depth."""

    def narrow(width: int) -> int:
        return width if width <= _FIXED else max(1, round(width / math.sqrt(scale)))

    return [tuple(tuple(map(narrow, shape)) for shape in layer) for layer in layers]


def _vgg16() -> Iterator[Layer]:
    inputs = 3
    for outputs in (64, 64, 128, 128, *[256] * 3, *[512] * 6):
        yield convolution(inputs, outputs, 3, biased=True, normed=True)
        inputs = outputs
    yield linear(inputs, 10)


def _resnet20() -> Iterator[Layer]:
    inputs = 3
    for outputs in (*[16] * 7, *[32] * 6, *[64] * 6):
        yield convolution(inputs, outputs, 3, biased=False, normed=True)
        inputs = outputs
    yield linear(inputs, 10)


def _alexnet() -> Iterator[Layer]:
    inputs = 3
    for outputs, kernel in ((64, 11), (192, 5), (384, 3), (256, 3), (256, 3)):
        yield convolution(inputs, outputs, kernel, biased=True, normed=False)
        inputs = outputs
    yield from (linear(256 * 6 * 6, 4096), linear(4096, 4096), linear(4096, 1000))


LAYERS: Final[Mapping[str, Callable[[], Iterator[Layer]]]] = {
    "vgg16": _vgg16,
    "resnet20": _resnet20,
    "alexnet": _alexnet,
    "resnet50": resnet50,
    "lstm-ptb": lstm_ptb,
}


def emulated(model: str, scale: float, rank: int) -> Compute:
    """Return a published model with about 1/scale of its parameters, at its workers' speed."""
    published = PUBLISHED[model]
    layers = thinner(list(LAYERS[model]()), scale)
    forward_seconds = FORWARD_SHARE * published.step_seconds
    layer_seconds = (published.step_seconds - forward_seconds) / len(layers)
    # Asleep, not busy: a GPU would compute, and leave the core to the exchange.
    make, pass_back = of_layers(layers, rank, lambda: time.sleep(layer_seconds))

    def backward(network: nn.Module) -> None:
        time.sleep(forward_seconds)
        pass_back(network)

    return Compute(model, True, scale, published.batch, make, backward)
