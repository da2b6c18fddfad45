"""How many parameters well-known models have (torchvision's and Hugging Face's, heads included)."""

from __future__ import annotations

from typing import Final

PARAMETERS: Final = {
    "resnet20": 269_722,  # for CIFAR-10
    "mobilenet-v2": 3_504_872,
    "resnet18": 11_689_512,
    "vgg16-cifar": 14_728_266,
    "resnet50": 25_557_032,
    "lstm-an4": 27_569_568,  # five layers of 800 after two convolutions, Shi et al. 2019
    "resnet101": 44_549_160,
    "alexnet": 61_100_840,
    "lstm-ptb": 66_034_000,  # two layers of 1500, Zaremba et al. 2014
    "vit-b16": 86_567_656,
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
    "vgg16": 138_357_544,
    "bert-large": 335_141_888,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
}
