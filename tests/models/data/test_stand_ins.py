"""Stand-ins for published sets: their shapes, something to learn, reproducible, labelled so."""

from __future__ import annotations

import torch

from models.data.synthetic_images import CIFAR10, IMAGENET, synthesise_images
from models.data.synthetic_speech import synthesise_speech
from models.data.synthetic_text import TEST, TRAIN, VOCABULARY, synthesise_text


def test_synthetic_images_have_the_published_shapes_and_counts() -> None:
    cifar, imagenet = synthesise_images(CIFAR10), synthesise_images(IMAGENET, 10)
    assert (len(cifar.train), len(cifar.test), cifar.classes) == (50_000, 10_000, 10)
    assert (len(imagenet.train), len(imagenet.test), imagenet.classes) == (10, 2, 1000)
    batch = cifar.train.__getitems__(range(200))
    assert batch.inputs.shape == (200, 3, 32, 32)
    assert batch.targets.unique().tolist() == list(range(10))
    assert abs(float(batch.inputs.std()) - 1) < 0.1
    assert imagenet.train[3].inputs.shape == (1, 3, 224, 224)
    assert [cifar.origin, imagenet.origin] == [
        "synthetic, like CIFAR-10",
        "synthetic, like ImageNet",
    ]


def test_synthetic_images_are_reproducible_and_differ_in_the_test_set() -> None:
    first, again, other = (synthesise_images(CIFAR10, 50, seed) for seed in (1, 1, 2))
    assert torch.equal(first.train[3].inputs, again.train[53].inputs)
    assert not torch.equal(first.train[3].inputs, other.train[3].inputs)
    assert not torch.equal(first.train[3].inputs, first.test[3].inputs)


def test_synthetic_image_classes_can_be_learned() -> None:
    data = synthesise_images(CIFAR10, 400)
    train, test = data.train.__getitems__(range(400)), data.test.__getitems__(range(80))
    looks = torch.stack([train.inputs[train.targets == c].mean(0).flatten() for c in range(10)])
    nearest = (test.inputs.flatten(1) @ looks.T).argmax(1)
    assert (nearest == test.targets).float().mean() > 0.8  # chance: 0.1


def test_synthetic_text_has_published_sizes_and_learnable_word_pairs() -> None:
    text = synthesise_text()
    assert (len(text.train), len(text.test), text.vocabulary) == (TRAIN, TEST, VOCABULARY)
    assert text.origin == "synthetic, like Penn Treebank"
    assert 0 <= int(text.train.min()) <= int(text.train.max()) < VOCABULARY
    # Word pairs of the training text recur in the test text, unlike pairs of shuffled words.
    pairs = set((text.train[:-1] * VOCABULARY + text.train[1:]).tolist())
    shuffled = text.test[torch.randperm(len(text.test), generator=torch.Generator().manual_seed(0))]
    seen, by_chance = (
        sum(pair in pairs for pair in (part[:-1] * VOCABULARY + part[1:]).tolist()) / len(part)
        for part in (text.test, shuffled)
    )
    assert seen > by_chance + 0.2
    assert len(synthesise_text(1000).train) == 1000


def test_synthetic_speech_has_published_sizes_and_growing_lengths() -> None:
    data = synthesise_speech()
    assert (len(data.train), len(data.test), data.origin) == (948, 130, "synthetic, like AN4")
    frames = [data.train[number].spectrogram.shape[1] for number in (0, 400, 947)]
    assert frames == sorted(frames)
    first, last = data.train[0], data.train[947]
    assert first.letters.tolist() != data.test[0].letters.tolist()
    assert torch.equal(first.spectrogram, synthesise_speech().train[0].spectrogram)
    assert int(last.letters.min()) >= 1
    assert len(last.letters) < last.spectrogram.shape[1] / 4, "there is a step for every letter"
