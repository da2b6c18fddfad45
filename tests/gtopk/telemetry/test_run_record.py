"""A rise of the logged loss is reported once; noise is not."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

import gtopk
from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.runtime.world import world
from gtopk.telemetry.run_record import WINDOW, LossWatch
from tests.gtopk.four_layers import distribute, inputs, layers


def reports_of(losses: Any, watch: LossWatch | None = None) -> list[tuple[int, str]]:
    """Return the messages about losses, each with the index of its loss."""
    watch = LossWatch() if watch is None else watch
    messages = [(step, watch.note(loss, step)) for step, loss in enumerate(losses)]
    return [(step, text) for step, text in messages if text]


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    drawn = random.Random(seed)
    return [2.0 + 3.0 * math.exp(-step / 100) + drawn.gauss(0, noise) for step in range(steps)]


def test_rising_loss_is_reported_once_with_both_means() -> None:
    losses = [*falling(200, 0.1), *(3.5 + loss - 2.0 for loss in falling(400, 0.1, 1))]
    ((step, text),) = reports_of(losses)
    assert step == 200 + 2 * WINDOW - 1
    assert f"and is {sum(losses[step - WINDOW + 1 : step + 1]) / WINDOW:.4g} at step {step}" in text
    assert "gtopk.ramp" in text


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_noisy_falling_loss_is_not_reported(noise: float) -> None:
    for seed in range(20):
        assert not reports_of(falling(2500, noise, seed))


def test_single_higher_window_is_not_reported() -> None:
    losses = falling(400, 0.1)
    losses[300 : 300 + WINDOW] = [loss + 5.0 for loss in losses[300 : 300 + WINDOW]]
    assert not reports_of(losses)


def test_rise_long_after_the_beginning_is_not_reported() -> None:
    assert not reports_of([*falling(100 * WINDOW, 0.1), *[9.0] * 200])


def test_nonfinite_losses_are_ignored() -> None:
    losses: list[Any] = falling(600, 0.1)
    losses[::7] = [math.nan] * len(losses[::7])
    assert not reports_of(losses)
    ((_, text),) = reports_of([*map(torch.tensor, losses), *[torch.tensor(6.0)] * 100])
    assert "nan" not in text


def test_losses_too_large_to_sum_do_not_raise() -> None:
    assert not reports_of([1e308] * 3 * WINDOW)
    assert reports_of([*[1e10] * WINDOW, *[1e300] * 2 * WINDOW])


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32])
def test_loss_rise_warns_only_on_rank_0_of_a_compressed_run(
    threads: Any, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    for compression, warnings in ((Compression.none, 0), (Compression.gtopk(0.5), 1)):
        caplog.clear()

        def program(transport: LocalTransport, compression: Any = compression) -> None:
            model = layers()
            with world.entered(transport):
                optimizer = distribute(model, compression)
                model(inputs(transport.rank, 0)).square().sum().backward()
                optimizer.step()
                for loss in (*falling(100, 0.0), *[7.0] * 100):
                    gtopk.log(loss=kind(loss), accuracy=0.5)

        threads(2, program)
        messages = [each for each in caplog.messages if "the loss has risen" in each]
        assert len(messages) == warnings


@pytest.mark.parametrize("value", ["0.3", None, torch.ones(2), np.ones(2), [0.3]])
def test_log_rejects_values_that_are_not_numbers_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"log\(loss=\.\.\.\) takes a number"):
        gtopk.log(loss=value)
    gtopk.log(loss=torch.ones(1, 1), accuracy=np.float32(0.5), steps=3)
