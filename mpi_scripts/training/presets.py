"""Runs by name: models, data and hyper-parameters of gTop-k's authors, and small ones.

The authors' presets follow their configuration files and trainer (Shi et al. 2019, ICDCS;
repository gtopkssgd): density 0.001, momentum and weight decay after the reduction, and for images
a learning rate that rises from 1/ranks of its value over 10 epochs; the value does not depend on
the number of ranks.

Where we differ, knowingly:

- `--compression gtopk` is this repository's gTop-k: ranks swap lists in butterfly rounds, nothing
  is lost, and an update has up to 2k entries. `--compression published` is the authors': a tree, k
  entries, and a pick that a merge drops is lost if another rank's pick of that index survives.
- Densities are constant. In the paper they fall during the first four epochs, which
  `--density-warmup-epochs 4` does step by step; in the authors' code the first epoch has 0.004.
- Each lane of Penn Treebank continues where the rank's last window ended. The authors shuffle
  windows, so that a window starts with the state of another place in the text.
- AN4 is not augmented (theirs: tempo and gain, by sox). WER is over all words, not the mean of the
  utterances' rates.
- All ranks share the evaluation, using the mean of their running statistics; in the authors' code
  rank 0 evaluates alone, with its own.
- ImageNet is read from its folders; test images are scaled to 256 pixels on the shorter side, then
  cropped to 224.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.alexnet import alexnet
from models.digits_cnn import digits_cnn
from models.gpt import Gpt
from models.lstm_an4 import LstmAn4
from models.lstm_ptb import LstmLanguageModel
from models.mlp import mlp
from models.resnet_cifar import resnet20
from models.resnet_imagenet import resnet50
from models.vgg_cifar import vgg16

from .classify import open_cifar10, open_digits, open_imagenet, open_table
from .read_on import CONTEXT, open_docstrings, open_ptb
from .schedules import Schedule, constant, cosine, decaying, stepwise
from .task import Feed, Sizes, Source, Task
from .transcribe import open_an4

CIFAR10_RATES: Final = stepwise(81, 122, 155, warmup_epochs=10)
IMAGENET_RATES: Final = stepwise(30, 60, 80, warmup_epochs=10)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The parts of a run.

    batch_size: samples per rank and backward pass; density: that of the sparse methods.
    is_adam: use AdamW instead of SGD. momentum_correction: apply momentum, or compute AdamW's
        steps, before the selection instead of after it.
    clip_norm: largest norm of the agreed update or, with momentum before the selection, of each
        rank's gradients; None: unlimited.
    is_at_hand: its data is real even without --data; has_workers: processes may load its batches.
    """

    open: Callable[[Source, Feed], Task[Any]]
    model: Callable[[Sizes], torch.nn.Module]
    epochs: int
    batch_size: int
    lr: float
    schedule: Schedule = constant
    momentum: float = 0.9
    weight_decay: float = 0.0
    is_adam: bool = False
    density: float = 0.001
    momentum_correction: bool = False
    clip_norm: float | None = None
    is_at_hand: bool = False
    has_workers: bool = True


PRESETS: Final = {
    "digits": Preset(
        open=open_table,
        model=lambda sizes: mlp(sizes.inputs, classes=sizes.outputs),
        epochs=30,
        batch_size=32,
        lr=0.05,
        density=0.01,
        momentum_correction=True,
    ),
    "cnn-digits": Preset(
        open=open_digits,
        model=lambda sizes: digits_cnn(round(sizes.inputs**0.5), sizes.outputs),
        epochs=20,
        batch_size=32,
        lr=0.05,
        density=0.02,
        momentum_correction=True,
        is_at_hand=True,
    ),
    "resnet20-cifar10": Preset(
        open=open_cifar10,
        model=lambda sizes: resnet20(sizes.outputs),
        epochs=141,
        batch_size=32,
        lr=0.1,
        schedule=CIFAR10_RATES,
        weight_decay=1e-4,
    ),
    "vgg16-cifar10": Preset(
        open=open_cifar10,
        model=lambda sizes: vgg16(sizes.outputs),
        epochs=141,
        batch_size=32,
        lr=0.1,
        schedule=CIFAR10_RATES,
        weight_decay=1e-4,
    ),
    "alexnet-imagenet": Preset(
        open=open_imagenet,
        model=lambda sizes: alexnet(sizes.outputs),
        epochs=95,
        batch_size=256,
        lr=0.01,
        schedule=IMAGENET_RATES,
        weight_decay=5e-4,
    ),
    "resnet50-imagenet": Preset(
        open=open_imagenet,
        model=lambda sizes: resnet50(sizes.outputs),
        epochs=95,
        batch_size=64,
        lr=0.01,
        schedule=IMAGENET_RATES,
        weight_decay=5e-4,
    ),
    "lstm-ptb": Preset(
        open=open_ptb,
        model=lambda sizes: LstmLanguageModel(sizes.outputs),
        epochs=50,
        batch_size=20,
        lr=1.0,
        # The authors' code lowers the rate at epochs 63 and 80, after the end of the run.
        momentum=0.0,
        clip_norm=0.25,
        has_workers=False,
    ),
    "lstm-an4": Preset(
        open=open_an4,
        model=lambda sizes: LstmAn4(bands=sizes.inputs, letters=sizes.outputs),
        epochs=100,
        batch_size=8,
        lr=3e-4,
        schedule=decaying(1.01),
        weight_decay=1e-4,
        clip_norm=400.0,
    ),
    "gpt-docstrings": Preset(
        open=open_docstrings,
        model=lambda sizes: Gpt(sizes.outputs, CONTEXT),
        epochs=10,
        batch_size=16,
        lr=1e-3,
        schedule=cosine(warmup_epochs=0.5),
        momentum=0.0,
        weight_decay=0.1,
        is_adam=True,
        density=0.05,
        momentum_correction=True,
        is_at_hand=True,
    ),
}
