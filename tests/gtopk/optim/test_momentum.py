"""Clipping that takes away what a correction has made: it is warned of, once, with the way out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.integrations.hook_skips import HookSkips
from gtopk.integrations.optimizer_checks import look_at_optimizers
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.momentum import ClippingWatch
from gtopk.runtime.world import world
from tests.gtopk.adamw import network, value

ADAM = {"adam_correction": (0.9, 0.999)}
MOMENTUM = {"momentum_correction": 0.9}
SAID = "are no gradients by then"


def trained(threads: Any, options: dict[str, Any], norm: float | None, **given: Any) -> None:
    """Train on two ranks, as a script that clips to a norm what the ranks have agreed on."""

    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu", enabled=given.pop("scaled", False))
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                model.named_parameters(),
                Compression.gtopk(0.3, **options),
                scaler=scaler,
                **given,
            )
            for step in range(8):
                optimizer.zero_grad()
                scaler.scale(value(model, transport.rank, step)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                if norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()

    threads(2, program)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [each.getMessage() for each in caplog.records if SAID in each.getMessage()]
    caplog.clear()
    return said


@pytest.mark.parametrize(
    ("options", "norm", "way"),
    [(ADAM, 0.1, "give AdamW itself"), (MOMENTUM, 0.001, "local_clip_norm=")],
)
def test_a_script_that_clips_behind_a_correction_is_told_once_what_to_do(
    threads, caplog, options, norm, way
):
    trained(threads, options, norm)
    said = warned(caplog)
    assert len(said) == 2  # each rank's, of which the first one's is seen
    assert all(way in each for each in said)
    trained(threads, options, None, global_clip_norm=norm)
    assert len(warned(caplog)) == 2


def test_clipping_that_leaves_most_of_it_or_is_of_gradients_is_nobodys_business(threads, caplog):
    trained(threads, MOMENTUM, 1e9)
    trained(threads, MOMENTUM, None)
    trained(threads, {}, 0.001)
    trained(threads, MOMENTUM, None, local_clip_norm=0.001)
    trained(threads, MOMENTUM, 1e9, scaled=True)  # what is unscaled is no shorter
    assert warned(caplog) == []
    trained(threads, MOMENTUM, 0.001, scaled=True)
    assert warned(caplog)


def test_a_hook_looks_at_each_of_the_models_optimizers(caplog):
    one, other = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    skips = HookSkips(lambda: {one, other}, 3)
    compression = Compression.gtopk(0.5, **ADAM)
    clipping = look_at_optimizers(skips, compression, 0, says=False, way="")
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (one, other)]
    for _ in range(5):
        for parameter in (one, other):
            parameter.grad = torch.ones(50)
        clipping.agree([one, other], None)
        torch.nn.utils.clip_grad_norm_([other], 0.1)
        for optimizer in optimizers:
            optimizer.step()
    (said,) = warned(caplog)
    assert "adam_correction=(0.9, 0.999)" in said


def test_one_short_step_between_long_ones_is_no_sign():
    said = logging.getLogger("gtopk")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    said.addHandler(handler)
    watch = ClippingWatch(Compression.gtopk(0.5, **ADAM))
    for applied in (0.01, 0.01, 0.5) * 5:
        watch.compare(1.0, applied)
    watch.compare(float("inf"), 0.0)
    said.removeHandler(handler)
    assert not records
