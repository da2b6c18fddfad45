"""Updates beyond the precision or range of the gradients' dtype: no infinity, no loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.exchange.buckets.buckets import Bucket
from gtopk.exchange.exchange import DenseExchange
from gtopk.exchange.residual import Residual
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Sum
from gtopk.runtime.world import world
from tests.gtopk.held import held

LARGEST = torch.finfo(torch.float16).max

SPARSE = [
    Compression.gtopk(0.5),
    Compression.topk(0.5),
    Compression.oktopk(0.5),
    Compression.hierarchical(0.5, inside="dense"),
    Compression.gtopk(0.5, wire="packed", values="int8"),
    Compression.shards(2, 4),
]


def scaler_of(scale: float) -> torch.amp.GradScaler:
    """Return a GradScaler with this scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(1))  # it has no scale before it is used
    return scaler


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("compression", SPARSE, ids=repr)
def test_part_of_a_sum_beyond_float16_stays_in_the_residuals(threads, compression, scale):
    """A loss scale known to the optimizer counts, as it enlarges the update."""

    def program(transport: LocalTransport) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.float16))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0),
                compression=compression,
                op=Sum,
                scaler=scaler_of(scale),
            )
            gradient = torch.tensor([5e4, -4e4, 7.0, 3e4, 0.5, -2.0], dtype=torch.float16)
            parameter.grad = gradient.clone()
            optimizer.step()
            assert not optimizer.last_step.skipped
            return gradient.double() / scale, parameter.grad.double() / scale, held(optimizer)

    ranks = threads(2, program)
    gradients = sum(gradient for gradient, _, _ in ranks)
    updates = [update for _, update, _ in ranks]
    assert torch.equal(updates[0], updates[1])
    assert float(updates[0].abs().max()) == LARGEST / scale
    left = sum(torch.from_numpy(residual).double() for _, _, residual in ranks)
    torch.testing.assert_close(updates[0] + left, gradients, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.bfloat16],
        [torch.float16],
        [torch.bfloat16, torch.float32, torch.bfloat16],
        [torch.float64, torch.float32],
    ],
    ids=str,
)
@pytest.mark.parametrize("compression", [SPARSE[0], SPARSE[3], Compression.topk(1.0)], ids=repr)
def test_rounding_error_of_the_gradients_dtype_is_sent_later(threads, compression, dtypes):
    """Gradients much smaller than others, or finer than the dtype, are finally applied.

    The loss is scaled by 3; the remainder of an update must be in the optimizer's scale.
    """
    steps = 60

    def program(transport: LocalTransport) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes]
        random = torch.Generator().manual_seed(transport.rank)
        given, applied = (torch.zeros(5 * len(dtypes), dtype=torch.float64) for _ in range(2))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(parameters, lr=0.0), compression=compression, scaler=scaler_of(3.0)
            )
            for _ in range(steps):
                for parameter in parameters:
                    parameter.grad = (torch.rand(5, generator=random) - 0.25).to(parameter.dtype)
                given += torch.cat([p.grad.double() for p in parameters]) / 3 / transport.size
                optimizer.step()
                applied += torch.cat([p.grad.double() for p in parameters]) / 3
            return given, applied, torch.from_numpy(held(optimizer)).double()

    ranks = threads(3, program)
    given = sum(given for given, _, _ in ranks)
    left = sum(left for _, _, left in ranks)
    # Only float32 additions round; bfloat16 would lose a thousand times as much per step.
    torch.testing.assert_close(ranks[0][1] + left, given, rtol=0, atol=1e-6 * steps)


@pytest.mark.parametrize("joins", [0, 2])
def test_joined_rank_keeps_its_rounding_error(threads, joins):
    """It computes an update's remainder like the others, with the same loss scale."""

    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(200, dtype=torch.bfloat16))
        random = torch.Generator().manual_seed(transport.rank)
        given, applied = torch.zeros(200).double(), torch.zeros(200).double()
        with world.entered(transport) as here:
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=0.0),
                compression=Compression.gtopk(0.2),
                scaler=scaler_of(3.0),
            )
            for _ in range(2 if transport.rank == joins else 6):
                parameter.grad = torch.randn(200, generator=random).bfloat16()
                given += parameter.grad.double() / 3 / transport.size
                optimizer.step()
                applied += parameter.grad.double() / 3
            here.engine.join().wait()
            return given, applied, torch.from_numpy(held(optimizer)).double()

    ranks = threads(3, program)
    given, left = (sum(rank[part] for rank in ranks) for part in (0, 2))
    torch.testing.assert_close(ranks[1][1] + left, given, rtol=0, atol=1e-5)


def test_joined_rank_skips_a_step_with_a_dense_sum_beyond_float16(threads):
    """All ranks skip the step; this rank also undoes the step's changes of residuals."""

    def program(transport: LocalTransport) -> tuple[np.ndarray, np.ndarray]:
        dense, sparse = (torch.nn.Parameter(torch.zeros(8, dtype=torch.float16)) for _ in range(2))
        with world.entered(transport) as here:
            optimizer = DistributedOptimizer(
                torch.optim.SGD([dense, sparse], lr=0.0),
                [("dense", dense), ("sparse", sparse)],
                Compression.gtopk(0.25, dense="dense"),
                op=Sum,
                scaler=scaler_of(4.0),
            )
            dense.grad, sparse.grad = torch.zeros_like(dense), torch.arange(8).half()
            optimizer.step()
            before = held(optimizer)
            if transport.rank:
                dense.grad, sparse.grad = torch.full_like(dense, 4e4), torch.arange(8).half()
                optimizer.step()
                assert optimizer.skipped_steps == 1
            here.engine.join().wait()
            return before, held(optimizer)

    for before, after in threads(3, program):
        np.testing.assert_array_equal(before, after)


def test_long_waiting_small_gradients_never_become_infinite(threads):
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
def test_dense_sum_beyond_float16_skips_the_step(threads, compression, dtypes):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dense_exchange_in_16_bits_keeps_the_rounding_error(threads, dtype, ranks):
    """Parts of old residuals may be smaller than one ulp of the gradient."""

    def program(transport: LocalTransport) -> Any:
        bucket = Bucket([torch.nn.Parameter(torch.zeros(64, dtype=dtype))])
        residual = Residual(bucket.length, bucket.dtype)
        residual.accumulate_and_select(np.full(64, 2.0**-11, np.float32), 1)
        before = torch.from_numpy(residual.values).double()
        exchange = DenseExchange(residual)
        given, applied = torch.zeros(64).double(), torch.zeros(64).double()
        for step in range(4):
            (parameter,) = bucket.parameters
            parameter.grad = torch.full((64,), 4.0 + step, dtype=dtype)
            given += parameter.grad.double() / transport.size
            bucket.capture_gradients(1 / transport.size)
            residual.snapshot()
            assert exchange(bucket, transport).finite
            exchange.apply(bucket)
            applied += parameter.grad.double()
        return before, given, applied, torch.from_numpy(residual.values).double()

    results = threads(ranks, program)
    before, given, _, left = (sum(part) for part in zip(*results, strict=True))
    assert all(torch.equal(results[0][2], applied) for _, _, applied, _ in results)
    assert float(left.abs().sum()) > 0
    torch.testing.assert_close(results[0][2] + left, before + given, rtol=1e-6, atol=0)
