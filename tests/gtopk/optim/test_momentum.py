"""Clipping with momentum correction trains like dense with clipping, or raises with advice."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.integrations.optimizer_checks import HookSkips, OptimizerChecks
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.adamw import value
from tests.gtopk.local_rounds import network

ADAM = {"adam_correction": (0.9, 0.999)}
MOMENTUM = {"momentum_correction": 0.9}
SGD = partial(torch.optim.SGD, lr=0.01)
CLIPPED = (
    r"scaled down between their exchange and step\(\), .* {}=.* leave out clip_grad_norm_ .*{}"
)


def train_and_clip(threads: Any, options: dict[str, Any], norm: float | None, **given: Any) -> None:
    """Train on two ranks like a script that clips the reduced gradients to a norm."""

    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu", enabled=given.get("scaled", False))
            optimizer = DistributedOptimizer(
                SGD(model.parameters()),
                model.named_parameters(),
                Compression.gtopk(0.3, **options),
                scaler=scaler,
            )
            for step in range(4):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                scaler.scale(value(model, transport.rank, step)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                if norm is not None and step == 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()

    threads(2, program)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("options", "advice"), [(ADAM, "Use AdamW itself"), (MOMENTUM, "local_clip_norm=")]
)
def test_clipping_behind_a_correction_raises_with_advice(threads, options, advice, scaled):
    message = CLIPPED.format(next(iter(options)), advice)
    with pytest.raises(ValueError, match=message):
        train_and_clip(threads, options, 0.1, scaled=scaled)
    for harmless in (None, math.inf):  # inf only computes the norm
        train_and_clip(threads, options, harmless, scaled=scaled)
    train_and_clip(threads, {}, 0.1, scaled=scaled)  # no error: gradients may be clipped


@pytest.mark.parametrize(
    ("options", "advice"), [(ADAM, "Use AdamW itself"), (MOMENTUM, "local_clip_norm=")]
)
def test_global_clip_norm_with_a_correction_raises_with_advice(options, advice):
    parameter = torch.nn.Parameter(torch.zeros(50))
    with pytest.raises(
        ValueError, match=rf"global_clip_norm is not for {next(iter(options))}=.*{advice}"
    ):
        DistributedOptimizer(
            SGD([parameter]), compression=Compression.gtopk(0.3, **options), global_clip_norm=1.0
        )


@pytest.mark.parametrize(
    ("kind", "options", "is_refused"),
    [(torch.optim.AdamW, {}, True), (SGD, ADAM, True), (SGD, MOMENTUM, False)],
)
def test_unscaling_adam_steps_needs_the_scaler_option(threads, kind, options, is_refused):
    def program(transport: LocalTransport) -> str:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu")
            optimizer = DistributedOptimizer(
                kind(model.parameters(), lr=0.01),
                model.named_parameters(),
                Compression.gtopk(0.3, **options),
            )
            scaler.scale(value(model, transport.rank, 0)).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                try:
                    scaler.step(optimizer)
                except ValueError as error:
                    return str(error)
        return ""

    for message in threads(2, program):
        assert bool(message) == is_refused
        assert not message or "GradScaler must be passed as scaler=" in message


@pytest.mark.parametrize("to_none", [False, True])
def test_step_after_cleared_gradients_warns_of_unreduced_gradients(threads, to_none):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                SGD(model.parameters()),
                model.named_parameters(),
                Compression.gtopk(0.3, **MOMENTUM),
            )
            value(model, transport.rank, 0).backward()
            optimizer.synchronize()
            optimizer.zero_grad(set_to_none=to_none)
            (1e-3 * value(model, 0, 1)).backward()
            with optimizer.skip_synchronize():  # a local step
                optimizer.step()

    with pytest.warns(UserWarning, match="steps with its own gradients"):
        threads(2, program)


def test_clipping_check_covers_each_optimizer_of_the_model():
    one, other = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    skips = HookSkips(lambda: {one, other}, 3)
    checks = OptimizerChecks(skips, Compression.gtopk(0.5, **ADAM), 0, logs_advice=False, hint="")
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (one, other)]
    for clips in (False, True):
        for parameter in (one, other):
            parameter.grad = torch.ones(50)
        checks.corrected.agree([one, other], None)
        if clips:
            torch.nn.utils.clip_grad_norm_([other], 0.1)
        optimizers[0].step()
        if not clips:
            optimizers[1].step()
    with pytest.raises(ValueError, match=CLIPPED.format("adam_correction", "Use AdamW")):
        optimizers[1].step()
    checks.corrected.agree([], None)  # after a pass that does not count
    optimizers[1].step()


def loss_of(model: torch.nn.Module, rank: int, step: int, size: int) -> torch.Tensor:
    """Return the loss of a rank's part of a batch; every tenth step has a long gradient."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 20, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True) * (20 if step % 10 == 0 else 1)
    error = model(inputs) - targets
    return error[rank::size].square().mean()


HEAVY = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.003)
ROWS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "synchronize, then clip_grad_norm_": (HEAVY, HEAVY, {}, {}),
    "global_clip_norm": (HEAVY, HEAVY, {}, {"global_clip_norm": 1.0}),
    "momentum_correction": (HEAVY, SGD, MOMENTUM, {"local_clip_norm": 1.0}),
    "AdamW": (ADAMW, ADAMW, {}, {"global_clip_norm": 1.0}),
}


@pytest.mark.parametrize("row", ROWS)
def test_training_with_clipping_reaches_the_dense_loss(threads, row):
    """Within a tenth of the possible gain; with clipped velocities, a third is missing."""
    dense_kind, kind, corrects, clips = ROWS[row]

    def program(transport: LocalTransport, *, is_dense: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )
        rank, size = transport.rank, transport.size

        def test_loss() -> float:
            with torch.no_grad():
                return sum(float(loss_of(model, 0, 10**6 + i, 1)) for i in range(1, 10)) / 9

        begun = test_loss()
        with world.entered(transport):
            optimizer: Any = DistributedOptimizer(
                (dense_kind if is_dense else kind)(model.parameters()),
                model.named_parameters(),
                Compression.none if is_dense else Compression.gtopk(0.25, **corrects),
                **({} if is_dense else clips),
            )
            for step in range(150):
                optimizer.zero_grad()
                loss_of(model, rank, step, size).backward()
                if clips and not is_dense:
                    optimizer.step()
                    continue
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.eval()
        return begun, test_loss()

    (begun, dense), (_, ours) = (
        threads(2, partial(program, is_dense=is_dense))[0] for is_dense in (True, False)
    )
    assert dense < 0.5 * begun
    assert ours - dense < 0.1 * (begun - dense)
