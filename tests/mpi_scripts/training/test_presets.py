"""Every preset trains on two ranks with its authors' settings, and labels synthetic data."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.cli.arguments import PARAMETERS
from gtopk.runtime.world import world
from models.alexnet import alexnet
from models.data import cifar10
from models.data.synthetic_images import IMAGENET
from models.gpt import Gpt
from models.lstm_an4 import LstmAn4
from models.lstm_ptb import LstmLanguageModel
from models.resnet_imagenet import resnet50
from mpi_scripts import train
from mpi_scripts.training import classify
from mpi_scripts.training.presets import PRESETS
from mpi_scripts.training.task import Sizes
from tests import published_files

# Narrow versions of the networks whose steps take seconds.
NARROW: dict[str, Callable[..., torch.nn.Module]] = {
    "alexnet-imagenet": lambda sizes: alexnet(sizes.outputs, hidden=8),
    "resnet50-imagenet": lambda sizes: resnet50(sizes.outputs, width=4),
    "lstm-ptb": lambda sizes: LstmLanguageModel(sizes.outputs, width=8),
    "lstm-an4": lambda sizes: LstmAn4(8, 2, sizes.inputs, sizes.outputs, channels=4),
    "gpt-docstrings": lambda sizes: Gpt(sizes.outputs, width=8, layers=1, heads=2),
}
REAL = {"digits", "cnn-digits", "gpt-docstrings"}
MEASURES = {
    "lstm-ptb": ("perplexity",),
    "lstm-an4": ("WER", "CER"),
    "gpt-docstrings": ("bits per byte",),
}


def trained(monkeypatch, capsys, *arguments: str) -> str:
    """Run train.py on two threads; return the one line that it prints."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])

    def rank(transport: LocalTransport) -> None:
        with world.entered(transport):
            train.train(train.prepare(train.parse()))

    run_ranks(local_world(2), rank)
    (line,) = capsys.readouterr().out.splitlines()
    return line


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_on_two_ranks(name: str, monkeypatch, capsys) -> None:
    if name in NARROW:
        monkeypatch.setitem(PRESETS, name, replace(PRESETS[name], model=NARROW[name]))
    arguments = ["--preset", name, "--steps", "2", "--batch-size", "2"]
    if name not in REAL:
        arguments += ["--synthetic-samples", "1000" if name == "lstm-ptb" else "8"]
    monkeypatch.setattr(classify, "IMAGENET", IMAGENET._replace(size=64))
    line = trained(monkeypatch, capsys, *arguments)
    measured = "  ".join(rf"test {each} ([\d.]+)" for each in MEASURES.get(name, ("accuracy",)))
    label = "" if name in REAL else r" \(synthetic, like [\w -]+\)"
    found = re.fullmatch(
        rf"epoch +1  loss ([\d.]+)  {measured}{label}  sent per rank [\d.]+ MB", line
    )
    assert found, line
    assert all(math.isfinite(float(each)) for each in found.groups())


def test_training_on_published_files_is_not_labelled_synthetic(
    monkeypatch, capsys, tmp_path
) -> None:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (4, 3, 32, 32), np.uint8), np.arange(4)
    (tmp_path / "cifar").mkdir()
    for name in (*cifar10.TRAIN, *cifar10.TEST):
        content = published_files.pickled_batch(images, labels)
        (tmp_path / "cifar" / name).write_bytes(content)
    monkeypatch.setattr(classify, "read_cifar10", partial(cifar10.read_cifar10, rows=4))
    (tmp_path / "mnist").mkdir()
    for part, array in (("images-idx3", images[:, 0, :28, :28]), ("labels-idx1", labels)):
        for name in ("train", "t10k"):
            content = published_files.idx(array.astype(np.uint8))
            (tmp_path / "mnist" / f"{name}-{part}-ubyte").write_bytes(content)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "folder" / part / name).mkdir(parents=True)
            for number in range(2):
                content = published_files.image(images[number].transpose(1, 2, 0))
                (tmp_path / "folder" / part / name / f"{number}.png").write_bytes(content)
    (tmp_path / "ptb").mkdir()
    for part in ("train", "valid"):
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text(" no it was n't N \n" * 60)
    for part in ("train", "val"):
        published_files.recordings(tmp_path / "an4", part, ["YES", "NO", "GO", "ONE"])
    for name, folder in (
        ("resnet20-cifar10", "cifar"),
        ("cnn-digits", "mnist"),
        ("resnet50-imagenet", "folder"),
        ("lstm-ptb", "ptb"),
        ("lstm-an4", "an4"),
    ):
        if name in NARROW:
            monkeypatch.setitem(PRESETS, name, replace(PRESETS[name], model=NARROW[name]))
        given = ["--preset", name, "--data", str(tmp_path / folder), "--steps", "1"]
        line = trained(monkeypatch, capsys, *given, "--batch-size", "2")
        assert "synthetic" not in line
        assert line.startswith("epoch   1  loss ")


def test_preset_models_have_the_parameters_that_plan_assumes() -> None:
    sizes = {"resnet20-cifar10": 10, "vgg16-cifar10": 10, "lstm-ptb": 10_000, "lstm-an4": 29}
    planned = {"resnet20-cifar10": "resnet20", "vgg16-cifar10": "vgg16-cifar"}
    for name in (n for n, preset in PRESETS.items() if preset.density == 0.001):
        with torch.device("meta"):
            model = PRESETS[name].model(Sizes(161, sizes.get(name, 1000)))
        parameters = PARAMETERS[planned.get(name, name.removesuffix("-imagenet"))]
        assert sum(p.numel() for p in model.parameters()) == parameters


def test_presets_have_the_hyper_parameters_of_the_papers_configuration() -> None:
    presets = {
        name: (each.lr, each.batch_size, each.epochs, each.momentum, each.weight_decay)
        for name, each in PRESETS.items()
        if each.density == 0.001
    }
    assert presets == {
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
