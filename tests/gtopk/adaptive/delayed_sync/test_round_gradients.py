"""A round's gradients may be scaled, clipped, summed, missing, or not finite."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.adaptive.replica import RoundExchange
from gtopk.exchange.buckets import buckets
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import Prompt, on_ranks
from tests.gtopk.adaptive.sums_of_samples import GTOPK, Model, data, run


def scaled_run(
    here: World, scales: list[float] | None, overflows: Callable[[int], bool], **options: Any
) -> Any:
    """Train an epoch with a GradScaler; set its scale after every micro-batch."""
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales is not None)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), GTOPK, scaler=scaler)
    loader = hvd.adapt(DataLoader(data(101), 8), optimizer, "abs", micro_batch=4)
    loader.rounds._wire = Prompt(loader.rounds._wire)
    kept = []
    for number, (indices, x) in enumerate(loader):
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        if overflows(number):
            model.weight.grad.fill_(float("inf"))
        else:
            kept += indices.tolist()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update(scales[number % len(scales)] if scales else None)
    return kept, model.weight.detach(), loader


@pytest.mark.parametrize("fused", [False, True])
def test_changing_loss_scale_leaves_round_weights_unchanged(fused: bool) -> None:
    def program(here: World, scales: list[float] | None) -> Any:
        _, weight, loader = scaled_run(here, scales, lambda number: False, fused=fused)
        return weight.numpy().tobytes(), loader.state_dict()["residual"].numpy().tobytes()

    scales = [4.0, 65536.0, 2.0, 1024.0, 0.5]
    scaled = on_ranks(2, lambda here: program(here, [s * 2**here.rank for s in scales]))
    assert scaled == on_ranks(2, lambda here: program(here, None))


@pytest.mark.parametrize("fused", [False, True])
def test_overflowing_micro_batch_is_excluded_with_its_samples(fused: bool) -> None:
    def program(here: World) -> Any:
        def overflows(number: int) -> bool:
            return here.rank == 1 and number in (1, 5)

        kept, weight, loader = scaled_run(here, [1.0], overflows, fused=fused)
        return kept, weight, loader.left_out, loader.rounds.skipped

    results = on_ranks(2, program)
    assert [left_out for *_, left_out, _ in results] == [0, 2]
    assert [skipped for *_, skipped in results] == [0, 0]
    assert len({i for kept, *_ in results for i in kept}) == 101 - 2 * 4
    assert torch.equal(results[0][1], results[1][1])
    assert bool(results[0][1].isfinite().all())


def test_excluded_micro_batch_warns_on_its_rank_and_not_of_cleared_gradients(caplog: Any) -> None:
    def program(here: World) -> None:
        scaled_run(here, [1.0], lambda number: number == 1)

    with caplog.at_level(logging.WARNING, "gtopk"):
        on_ranks(2, program)
    warnings = [each for each in caplog.records if "is left out of its round" in each.getMessage()]
    assert warnings
    # With "everywhere", only rank 0 would print it.
    assert not any(hasattr(each, "everywhere") for each in warnings)
    assert "cleared without a step" not in caplog.text


def test_round_update_is_clipped_to_global_norm() -> None:
    def program(here: World) -> list[float]:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), GTOPK, global_clip_norm=1e-3
        )
        moves, before = [], [model.weight.detach().clone()]
        inner_step = optimizer._step_wrapped

        def step() -> None:
            inner_step()
            moves.append(float((model.weight.detach() - before[0]).norm()))
            before[0] = model.weight.detach().clone()

        optimizer._step_wrapped = step
        run(hvd.adapt(DataLoader(data(64), 8), optimizer, "abs", micro_batch=4), model, optimizer)
        return moves

    for moves in on_ranks(2, program):
        assert moves
        assert moves == pytest.approx([1e-3] * len(moves), rel=1e-3)


def test_local_sums_are_clipped_to_rank_share_before_residual() -> None:
    allowed, samples = 0.1, [5, 15]

    def program(here: World) -> Any:
        model = Model()
        exchange = RoundExchange(list(model.parameters()), GTOPK)
        sums = torch.tensor([3.0, -4.0, 12.0]).double() * (1 + here.rank)
        assert exchange.capture_sums([sums.clone()], allowed)
        share = samples[here.rank] / sum(samples)
        update = here.engine.submit(
            "clipped",
            [],
            lambda transport, all_flags: exchange.reduce(transport, 1 / sum(samples), share),
        ).wait()
        return update[0], exchange.state_dict()["residual"], sums

    ranks = on_ranks(2, program)
    shares = [each / sum(samples) for each in samples]
    clipped = sum(
        allowed * share**0.5 * sums / sums.norm()
        for share, (*_, sums) in zip(shares, ranks, strict=True)
    )
    left = sum(residual for _, residual, _ in ranks)
    torch.testing.assert_close(ranks[0][0] + left, clipped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_many_samples_do_not_overflow_16_bit_parameters(dtype: torch.dtype) -> None:
    """The mean gradient is 100 over 2,048 samples; their sum does not fit 16 bits."""

    def program(here: World) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        loader = hvd.adapt(
            DataLoader(TensorDataset(torch.zeros(4096)), 2048), optimizer, "abs", micro_batch=2
        )
        for _ in loader:
            (100 * weight.sum()).backward()
            optimizer.step()
            if loader.round or loader.drain_wanted:
                break
        loader.drain()
        assert optimizer.skipped_steps == 0
        return weight.detach().float() / loader.round

    for moved in on_ranks(2, program):
        torch.testing.assert_close(moved, torch.full((2,), -100.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("missing_on", [[0, 1], [1]])
def test_optimizer_skips_parameters_without_gradient_on_any_rank(missing_on: list[int]) -> None:
    def program(here: World) -> list[torch.Tensor]:
        used, rare = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in "ab")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([used, rare], lr=0.1, weight_decay=0.5),
            [("used", used), ("rare", rare)],
        )
        loader = hvd.adapt(DataLoader(data(64), 8), optimizer, "abs", micro_batch=4)
        for _, x in loader:
            loss = (x @ used).mean()
            if here.rank not in missing_on:
                loss = loss + 0 * rare.sum()
            loss.backward()
            optimizer.step()
        return [used.detach(), rare.detach()]

    for used, rare in on_ranks(2, program):
        assert not torch.equal(used, torch.ones(3, dtype=torch.float64))
        decays = len(missing_on) == 1
        assert torch.equal(rare, torch.ones(3, dtype=torch.float64)) != decays


def test_updates_are_read_on_the_stream_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the engine's own stream could read them too early."""
    here, read_on_stream = threading.local(), []

    @contextmanager
    def on_stream() -> Iterator[None]:
        before, here.is_on_stream = getattr(here, "is_on_stream", False), True
        yield
        here.is_on_stream = before

    read = torch.Tensor.any

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        read_on_stream.append(getattr(here, "is_on_stream", False))
        return read(tensor)

    monkeypatch.setattr(buckets, "current_stream", lambda device: on_stream)
    monkeypatch.setattr(torch.Tensor, "any", noted)
    test_optimizer_skips_parameters_without_gradient_on_any_rank([0, 1])
    assert read_on_stream
    assert all(read_on_stream)


def test_overflowing_sum_leaves_residual_unchanged(threads: Any) -> None:
    def program(transport: LocalTransport) -> None:
        exchange = RoundExchange([torch.nn.Parameter(torch.zeros(2))], hvd.Compression.gtopk(0.5))

        def reduced(*sums: float) -> list[list[float]] | None:
            exchange.capture_sums([torch.tensor(sums)])
            update = exchange.reduce(transport, 0.5)
            return update and [each.tolist() for each in update]

        large = float(np.float32(2.9e38))
        assert reduced(3e38, large) == [[float(np.float32(3e38)), 0.0]]
        before = exchange.state_dict()
        assert reduced(0.0, large) is None  # the residual and this, of two ranks
        assert torch.equal(exchange.state_dict()["residual"], before["residual"])
        assert reduced(0.0, 0.0) == [[0.0, large]]

    threads(2, program)
