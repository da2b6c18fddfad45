"""Residuals survive the end of a rank's batches, and a new world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, flat, inputs, layers
from tests.gtopk.held import held


@pytest.mark.parametrize(
    "compression", [Compression.none, Compression.gtopk(0.3), Compression.topk(1.0)], ids=repr
)
@pytest.mark.parametrize("missing", ["error", "zeros"])
def test_residuals_of_joined_ranks_are_sent(threads, compression, missing):
    batches = [6, 3, 4]

    def program(transport: LocalTransport) -> Any:
        model, skipped = layers(), []
        with world.entered(transport) as here:
            optimizer = distribute(model, compression, missing_gradients=missing)
            for step in range(batches[transport.rank]):
                optimizer.zero_grad()
                model(inputs(transport.rank, step)).square().sum().backward()
                if step == 4 and transport.rank == 0:
                    model[1].weight.grad[0, 0] = float("nan")
                optimizer.step()
                skipped.append(optimizer.last_step.skipped)
            before = held(optimizer)
            last = here.engine.join().wait()
            assert optimizer._handles == {}
            return flat(model), before, held(optimizer), skipped, last

    ranks = threads(3, program)
    assert ranks[0][3] == [False, False, False, False, True, False]
    assert {rank[4] for rank in ranks} == {0}
    assert torch.isfinite(ranks[0][0]).all()
    if isinstance(compression, type) or compression.density == 1.0:
        return
    for _, before, after, _, _ in ranks[1:]:
        assert np.abs(before).sum() > 0
        assert (before != after).any()


@pytest.mark.parametrize("on_divergence", ["error", "heal"])
def test_replicas_are_not_compared_while_a_rank_has_joined(threads, on_divergence):
    """Its parameters are out of date, as expected."""
    batches = [7, 3]

    def program(transport: LocalTransport) -> int:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model, check_every=2, on_divergence=on_divergence)
            for step in range(batches[transport.rank]):
                optimizer.zero_grad()
                model(inputs(transport.rank, step)).square().sum().backward()
                optimizer.step()
            here.engine.join().wait()
            return optimizer.divergences

    assert threads(2, program) == [0, 0]


def test_rank_that_joins_before_its_first_step_is_named(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model)
            if transport.rank != 1:
                model(inputs(transport.rank, 0)).square().sum().backward()
                message = "rank 1 joined: every rank must take a step before one joins"
                with pytest.raises(HorovodInternalError, match=message):
                    optimizer.step()
            here.engine.join().wait()
            optimizer.zero_grad()
            model(inputs(transport.rank, 0)).square().sum().backward()
            optimizer.step()

    threads(3, program)


def test_joining_without_an_optimizer_raises_with_advice(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport) as here:
            if transport.rank == 1:
                with pytest.raises(
                    HorovodInternalError, match="create the optimizer on every rank"
                ):
                    here.engine.join().wait()
                return
            optimizer = distribute(model)
            model(inputs(transport.rank, 0)).square().sum().backward()
            with pytest.raises(HorovodInternalError):
                optimizer.step()

    threads(2, program)


def test_residuals_continue_in_the_next_world():
    """As after an elastic recovery, here with fewer ranks."""
    models = [layers() for _ in range(3)]
    optimizers: list[Any] = [None] * 3

    def train(transport: LocalTransport) -> tuple[np.ndarray, np.ndarray]:
        rank = transport.rank
        with world.entered(transport):
            optimizers[rank] = optimizers[rank] or distribute(models[rank])
            before = held(optimizers[rank])
            for step in range(3):
                optimizers[rank].zero_grad()
                models[rank](inputs(rank, step)).square().sum().backward()
                optimizers[rank].step()
                if step == 0:
                    after_one = held(optimizers[rank])
            return before, after_one

    run_ranks(local_world(3, 30), train)
    left = [held(optimizer) for optimizer in optimizers]
    for rank, (before, after_one) in enumerate(run_ranks(local_world(2, 30), train)):
        np.testing.assert_array_equal(before, left[rank])
        assert after_one.any()
    assert torch.equal(flat(models[0]), flat(models[1]))
