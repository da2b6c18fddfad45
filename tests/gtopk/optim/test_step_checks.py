"""Replicas are compared after the same steps on all ranks; a skipped step is reported once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.optim.step_checks import SkippedSteps
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, inputs, layers


def take_steps(model: Any, optimizer: Any, steps: int, scale: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs(hvd.rank(), 0)).square().sum() * scale).backward()
        optimizer.step()


def test_ranks_that_join_in_every_epoch_check_after_the_same_steps(threads):
    """They diverge at the first step that one of them lacks, and each check reports it.

    epoch            1                     2                         3
    rank 0   1 2 3 4 5 6 -   8 9 10 11 12 13 -   15 16 17 18 19 20 -
    rank 1   1 2 3 4 5 6 7   8 9 10 11 12 13 14  15 16 17 18 19 20 21
    found                      ^        ^         ^        ^
    """

    def program(transport: LocalTransport) -> int:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, check_every=3, on_divergence="warn")
            for _ in range(3):
                take_steps(model, optimizer, 6 + transport.rank)
                hvd.join()
            return optimizer.divergences

    assert threads(2, program) == [4, 4]


def test_skipped_step_is_followed_by_no_check(threads):
    """Also if this rank had joined during all steps before it."""

    def program(transport: LocalTransport) -> int:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, check_every=2, on_divergence="warn")
            take_steps(model, optimizer, 1 + transport.rank)
            hvd.join()
            take_steps(model, optimizer, 1, scale=float("nan"))
            assert optimizer.divergences == 0
            take_steps(model, optimizer, 2)
            return optimizer.divergences

    assert threads(2, program) == [1, 1]


def test_missing_broadcast_is_reported_after_the_first_step(threads, caplog):
    def program(transport: LocalTransport) -> int:
        model = layers()
        with world.entered(transport), torch.no_grad():
            next(model.parameters()).add_(transport.rank)
            with torch.enable_grad():
                optimizer = distribute(model)
                take_steps(model, optimizer, 3)
            return optimizer.divergences

    assert threads(2, program) == [1, 1]
    assert "the replicas are not the same at step 1: parameter '" in caplog.text
    assert "Start with broadcast_parameters" in caplog.text


@pytest.mark.parametrize("change", ["load on rank 0", "load", "add", "thaw", "nothing"])
def test_first_step_with_a_loaded_state_or_a_new_parameter_is_checked(threads, change):
    """Its model may have been loaded, or its layer initialized, on each rank by itself."""

    def program(transport: LocalTransport) -> int:
        model = layers()
        model[3].requires_grad_(change != "thaw")
        part = model[:3] if change == "add" else model
        with world.entered(transport):
            optimizer = distribute(part)
            take_steps(model, optimizer, 4)
            state = optimizer.state_dict()
            if change == "load" or (change == "load on rank 0" and transport.rank == 0):
                optimizer.load_state_dict(state)
            if change == "add":
                optimizer.add_param_group({"params": model[3].parameters()})
            model[3].requires_grad_(True)
            with torch.no_grad():
                model[3].weight.add_(transport.rank)
            take_steps(model, optimizer, 3)
            return optimizer.divergences

    assert threads(2, program) == [change != "nothing"] * 2


def test_replicas_are_checked_every_100_steps_by_default(threads, caplog):
    def program(transport: LocalTransport) -> int:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, 50)
            if transport.rank == 1:
                with torch.no_grad():
                    next(model.parameters())[0] += 1
            take_steps(model, optimizer, 49)
            assert optimizer.divergences == 0
            take_steps(model, optimizer, 1)
            return optimizer.divergences

    assert threads(3, program) == [1, 1, 1]


def test_check_every_0_checks_no_replicas(threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            with torch.no_grad():
                next(model.parameters()).add_(transport.rank)
            take_steps(model, distribute(model, check_every=0), 2)

    threads(2, program)
    assert "not the same" not in caplog.text


def test_step_completed_by_one_rank_only_keeps_checks_aligned():
    """The other failed in it, and both continue in the next world, as after an elastic recovery."""
    models = [layers() for _ in range(2)]
    optimizers: list[Any] = [None] * 2

    def train(transport: LocalTransport) -> None:
        model = models[transport.rank]
        with world.entered(transport):
            optimizer = optimizers[transport.rank] = distribute(model, check_every=2)
            take_steps(model, optimizer, 2)
            optimizer.zero_grad()
            model(inputs(transport.rank, 0)).square().sum().backward()
            optimizer.synchronize()
            if transport.rank == 0:
                with optimizer.skip_synchronize():
                    optimizer.step()

    def continue_training(transport: LocalTransport) -> None:
        model, optimizer = models[transport.rank], optimizers[transport.rank]
        with world.entered(transport):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            take_steps(model, optimizer, 4)

    run_ranks(local_world(2, 30), train)
    run_ranks(local_world(2, 30), continue_training)


@pytest.mark.parametrize(
    ("where", "logged", "reason"),
    [
        ("rank 3: 'w'", "the gradient is not finite on rank 3: 'w'", "a gradient is not finite on"),
        ("", "the sum of finite gradients is not finite", "a sum overflowed"),
    ],
)
def test_skip_message_tells_nonfinite_gradient_from_overflowed_sum(
    where, logged, reason, caplog
) -> None:
    skipped = SkippedSteps(0)
    with pytest.raises(FloatingPointError, match=f"skipped at step 7, the last because {reason}"):
        skipped.note(1, 7, where)
    assert caplog.messages == [
        f"rank 1: step 7 is skipped on every rank, residuals untouched: {logged}"
    ]
    assert caplog.records[0].everywhere  # equal on all ranks: without GTOPK_LOG, rank 0 prints it
