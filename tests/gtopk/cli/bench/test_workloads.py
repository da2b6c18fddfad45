"""Emulated compute takes the given time; its gradients come by layer, last layer first."""

from __future__ import annotations

import pytest
import torch

from gtopk.cli.bench.harness import real
from mpi_scripts.scaling import models
from mpi_scripts.scaling.models import PUBLISHED, emulated


def test_emulated_step_sleeps_for_the_published_time(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[float | int] = []
    monkeypatch.setattr(models.time, "sleep", events.append)
    setting = emulated("vgg16", 100.0, rank=0)
    model = setting.make()
    published = PUBLISHED["vgg16"]
    for number, layer in enumerate(model.layers):
        for parameter in layer:
            parameter.register_post_accumulate_grad_hook(
                lambda p, number=number: events.append(number)
            )
    setting.backward(model)
    seconds = [each for each in events if isinstance(each, float)]
    layers = [each for each in events if isinstance(each, int)]
    assert sum(seconds) == pytest.approx(published.step_seconds)
    vectors = {number: len(layer) for number, layer in enumerate(model.layers)}
    assert layers == [number for number in reversed(vectors) for _ in range(vectors[number])]
    # A layer's gradients are ready after its part of the time.
    assert events[-1 - vectors[0] :] == [seconds[-1], *[0] * vectors[0]]


def test_emulated_gradients_repeat_every_step_and_differ_between_ranks() -> None:
    settings = [emulated("resnet20", 1000.0, rank) for rank in (0, 1)]
    models = [setting.make() for setting in settings]
    gradients = []
    for setting, model in zip(settings, models, strict=True):
        for _ in range(2):
            model.zero_grad()
            setting.backward(model)
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])


def test_real_compute_gives_finite_gradients() -> None:
    setting = real("resnet20", 1, rank=0)
    model = setting.make()
    setting.backward(model)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
