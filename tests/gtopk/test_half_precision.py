"""Updates beyond what the gradients' dtype can hold: never infinity, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport
from gtopk import world
from gtopk.compression import Compression
from gtopk.optimizer import DistributedOptimizer
from gtopk.reductions import Sum
from tests.gtopk.held import held

LARGEST = torch.finfo(torch.float16).max

SPARSE = [
    Compression.gtopk(0.5),
    Compression.topk(0.5),
    Compression.oktopk(0.5),
    Compression.hierarchical(0.5, inside="dense"),
    Compression.gtopk(0.5, wire="packed", values="int8"),
]


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("compression", SPARSE, ids=repr)
def test_what_a_sum_has_beyond_float16_stays_in_the_residuals(threads, compression, scale):
    """A loss scale that the optimizer is told of counts: the update is as large as that."""

    def program(transport: LocalTransport) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.float16))
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.zeros(1))  # it has no scale before it is used
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression, op=Sum, scaler=scaler
            )
            gradient = torch.tensor([5e4, -4e4, 7.0, 3e4, 0.5, -2.0], dtype=torch.float16)
            parameter.grad = gradient.clone()
            optimizer.synchronize()
            assert not optimizer.last_step.skipped
            return gradient.double() / scale, parameter.grad.double() / scale, held(optimizer)

    ranks = threads(2, program)
    gradients = sum(gradient for gradient, _, _ in ranks)
    updates = [update for _, update, _ in ranks]
    assert torch.equal(updates[0], updates[1])
    assert float(updates[0].abs().max()) == LARGEST / scale
    left = sum(torch.from_numpy(residual).double() for _, _, residual in ranks)
    # Rounding to float16, of an update up to 65504, is all that is not there.
    torch.testing.assert_close(updates[0] + left, gradients, rtol=0, atol=16 / scale)


def test_small_gradients_that_wait_for_long_never_become_infinite(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(300, dtype=torch.float16))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1e-3), compression=Compression.gtopk(1 / 300)
            )
            for _ in range(400):
                parameter.grad = torch.full_like(parameter, 500.0)
                optimizer.step()
            assert optimizer.skipped_steps == 0
        return parameter.detach()

    one, other = threads(2, program)
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())


@pytest.mark.parametrize("dtypes", [[torch.float16], [torch.float16, torch.float32]])
@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(1.0, dense="0")])
def test_a_dense_sum_beyond_float16_skips_the_step(threads, compression, dtypes):
    def program(transport: LocalTransport) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
        named = [(str(place), parameter) for place, parameter in enumerate(parameters)]
        if len(named) == 1 and compression is not Compression.none:
            named.append(("1", torch.nn.Parameter(torch.zeros(3))))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([p for _, p in named], lr=1.0), named, compression, op=Sum
            )
            for value in (4e4, 2.0):
                for _, parameter in named:
                    parameter.grad = torch.full_like(parameter, value)
                optimizer.step()
        assert optimizer.skipped_steps == 1
        for _, parameter in named:
            np.testing.assert_array_equal(parameter.detach().numpy(), -4.0)

    threads(2, program)
