"""Every preset trains on two ranks, as its authors have it, and labels what is not real."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk import world
from models.alexnet import alexnet
from models.gpt import Gpt
from models.lstm_an4 import LstmAn4
from models.lstm_ptb import LstmLanguageModel
from models.resnet_imagenet import resnet50
from mpi_scripts import train
from mpi_scripts.training.presets import PRESETS

# Of the networks that take seconds for a step, narrow ones.
NARROW: dict[str, Callable[..., torch.nn.Module]] = {
    "alexnet-imagenet": lambda sizes: alexnet(sizes.outputs, hidden=8),
    "resnet50-imagenet": lambda sizes: resnet50(sizes.outputs, width=4),
    "lstm-ptb": lambda sizes: LstmLanguageModel(sizes.outputs, width=8),
    "lstm-an4": lambda sizes: LstmAn4(8, 2, sizes.inputs, sizes.outputs),
    "gpt-docstrings": lambda sizes: Gpt(sizes.outputs, width=8, layers=1, heads=2),
}
REAL = {"digits", "cnn-digits", "gpt-docstrings"}
MEASURES = {
    "lstm-ptb": ("perplexity",),
    "lstm-an4": ("WER", "CER"),
    "gpt-docstrings": ("bits per byte",),
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_on_two_ranks(name: str, monkeypatch, capsys) -> None:
    if name in NARROW:
        monkeypatch.setitem(PRESETS, name, replace(PRESETS[name], model=NARROW[name]))
    arguments = ["--preset", name, "--steps", "2", "--batch-size", "2"]
    if name not in REAL:
        arguments += ["--synthetic-samples", "1000" if name == "lstm-ptb" else "8"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])

    def rank(transport: LocalTransport) -> None:
        with world.entered(transport):
            train.train(train.prepare(train.parse()))

    run_ranks(local_world(2), rank)
    (line,) = capsys.readouterr().out.splitlines()
    measured = "  ".join(rf"test {each} ([\d.]+)" for each in MEASURES.get(name, ("accuracy",)))
    label = "" if name in REAL else r" \(synthetic, like [\w -]+\)"
    found = re.fullmatch(
        rf"epoch +1  loss ([\d.]+)  {measured}{label}  sent per rank [\d.]+ MB", line
    )
    assert found, line
    assert all(math.isfinite(float(each)) for each in found.groups())


def test_the_authors_hyper_parameters_are_those_of_their_configuration() -> None:
    told = {
        name: (each.lr, each.batch_size, each.epochs, each.momentum, each.weight_decay)
        for name, each in PRESETS.items()
        if each.density == 0.001
    }
    assert told == {
        "resnet20-cifar10": (0.1, 32, 141, 0.9, 1e-4),
        "vgg16-cifar10": (0.1, 32, 141, 0.9, 1e-4),
        "alexnet-imagenet": (0.01, 256, 95, 0.9, 5e-4),
        "resnet50-imagenet": (0.01, 64, 95, 0.9, 5e-4),
        "lstm-ptb": (1.0, 20, 50, 0.0, 0.0),
        "lstm-an4": (3e-4, 8, 100, 0.9, 1e-4),
    }
    assert {n: p.clip_norm for n, p in PRESETS.items() if p.clip_norm} == {
        "lstm-ptb": 0.25,
        "lstm-an4": 400.0,
    }
