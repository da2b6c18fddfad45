"""The emulated networks have the layers of the real ones, and thinner ones stay networks."""

from __future__ import annotations

import math

import pytest
import torch

from models.alexnet import alexnet
from models.lstm_ptb import LstmLanguageModel
from models.resnet_cifar import resnet20
from models.resnet_imagenet import resnet50
from models.vgg_cifar import vgg16
from mpi_scripts.scaling.models import LAYERS, PUBLISHED, thinner

MODELS = {
    "vgg16": vgg16,
    "resnet20": resnet20,
    "alexnet": alexnet,
    "resnet50": resnet50,
    "lstm-ptb": LstmLanguageModel,
}
# As published.
ELEMENTS = {
    "vgg16": 14_728_266,
    "resnet20": 269_722,
    "alexnet": 61_100_840,
    "resnet50": 25_557_032,
    "lstm-ptb": 66_034_000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_emulated_layers_have_the_shapes_of_the_models_parameters(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    shapes = [shape for layer in LAYERS[name]() for shape in layer]
    assert shapes == [tuple(p.shape) for p in model.parameters()]
    assert sum(map(math.prod, shapes)) == ELEMENTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_thinner_model_keeps_its_layers_with_a_tenth_of_the_parameters(name: str) -> None:
    layers = list(LAYERS[name]())
    thin = thinner(layers, 10.0)
    assert [len(layer) for layer in thin] == [len(layer) for layer in layers]
    elements = sum(math.prod(shape) for layer in thin for shape in layer)
    assert elements == pytest.approx(ELEMENTS[name] / 10, rel=0.03)
    assert thinner(layers, 1.0) == layers
    for layer in thinner(layers, 1e9):
        assert all(dimension >= 1 for shape in layer for dimension in shape)
