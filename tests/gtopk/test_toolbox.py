"""Around the method: warm-up, clipping, policies, loss scales, replicas, skipped steps."""

from __future__ import annotations

import logging
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Sum
from gtopk.runtime.logs import EVERYWHERE
from gtopk.runtime.world import world
from tests.gtopk.held import held


def network() -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    ).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return model


def value(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().sum()


def distribute(model: torch.nn.Module, compression: Any = Compression.none, **options: Any) -> Any:
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        compression,
        **{"bucket_bytes": 200, **options},
    )


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_warm_up_sends_fewer_entries_each_step(threads):
    def program(transport: LocalTransport) -> list[int]:
        model, sent = network(), []
        with world.entered(transport):
            optimizer = distribute(
                model, Compression.gtopk(0.05, warmup_steps=3, warmup_from=0.8), bucket_bytes=None
            )
            for step in range(5):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                optimizer.step()
                sent.append(optimizer.last_step.selected)
        return sent

    first, second = threads(2, program)
    elements = flat(network()).numel()
    assert first == second
    assert first[0] == round(0.8 * elements)
    assert first[:4] == sorted(first[:4], reverse=True)
    assert first[3:] == [round(0.05 * elements)] * 2


def test_ranks_at_different_warm_up_steps_raise(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.05, warmup_steps=5))
            value(model, transport.rank, 0).backward()
            optimizer.step()
            optimizer._reducer.progress.steps += transport.rank
            optimizer.zero_grad()
            value(model, transport.rank, 1).backward()
            with pytest.raises(HorovodInternalError, match=r"at step 1.*at step 2"):
                optimizer.step()

    threads(2, program)


def test_uncompressed_parameters_have_no_residual(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.05, dense_vectors=True))
            for step in range(3):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                optimizer.step()
            assert optimizer.last_step.algorithm == "dense+gtopk"
            names, _ = optimizer._reducer.export_state()
            assert set(names) == {"0.weight", "2.weight", "3.weight"}

    threads(2, program)


def test_momentum_correction_applies_to_uncompressed_parameters(threads):
    """At density 1 and with all else dense, it is SGD with momentum."""

    def program(transport: LocalTransport, compression: Any, momentum: float) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum),
                model.named_parameters(),
                compression,
            )
            for step in range(4):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                optimizer.step()
        return flat(model)

    all_dense = Compression.gtopk(0.5, dense="", momentum_correction=0.9)
    corrected, plain = (
        threads(3, lambda t, options=options: program(t, *options))[0]
        for options in ((all_dense, 0.0), (Compression.none, 0.9))
    )
    torch.testing.assert_close(corrected, plain, rtol=1e-12, atol=1e-12)


def test_reduced_update_is_clipped_to_global_clip_norm(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, global_clip_norm=0.01)
            before = flat(model)
            value(model, transport.rank, 0).backward()
            optimizer.step()
            return (flat(model) - before) / 0.05

    for move in threads(3, program):
        assert float(move.norm()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("reduction", "options"),
    [
        ("sum", {"op": Sum}),
        ("mean", {}),
        ("mean", {"gradient_predivide_factor": 2.0}),
        ("mean", {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}),
        ("samples' mean", {}),
        ("samples' sum", {}),
    ],
)
def test_local_clip_norm_clips_a_ranks_part_before_the_residual(threads, reduction, options):
    size, allowed = 4, 0.1
    samples = [3 + 4 * rank for rank in range(size)]
    scale = options["scaler"].get_scale() if "scaler" in options else 1.0

    def program(transport: LocalTransport) -> Any:
        model, rank = network(), transport.rank
        with world.entered(transport):
            optimizer = distribute(
                model, Compression.gtopk(0.01), local_clip_norm=allowed, **options
            )
            if reduction.startswith("samples"):
                optimizer.set_num_samples(samples[rank], reduction.removeprefix("samples' "))
            (value(model, rank, 0) * scale).backward()
            own = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy() / scale
            optimizer.step()
            update = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
            return own, held(optimizer), update / scale

    ranks = threads(size, program)
    shares = [1 / size] * size
    if reduction.startswith("samples"):
        shares = [each / sum(samples) for each in samples]
    weights = {"sum": [1.0] * size, "samples' sum": [1 / sum(samples)] * size}.get(
        reduction, shares
    )
    parts = [weight * own for weight, (own, *_) in zip(weights, ranks, strict=True)]
    clipped = [
        part * min(1.0, allowed * np.sqrt(share) / np.linalg.norm(part))
        for part, share in zip(parts, shares, strict=True)
    ]
    assert np.linalg.norm(clipped[1]) == pytest.approx(allowed * np.sqrt(shares[1]))
    unsent = sum(residual for _, residual, _ in ranks)
    np.testing.assert_allclose(ranks[0][2] + unsent, sum(clipped), atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("by_samples", [False, True])
def test_mean_of_independent_gradients_within_local_clip_norm_is_kept(threads, ranks, by_samples):
    """Each is sqrt(ranks) times as long as their mean, or by samples 1/sqrt(its share)."""
    counts = [1 + rank for rank in range(ranks)] if by_samples else [1] * ranks

    def program(transport: LocalTransport) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(ranks, dtype=torch.float64))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), [("weight", weight)], local_clip_norm=1.0
            )
            if by_samples:
                optimizer.set_num_samples(counts[transport.rank])
            gradient = torch.zeros_like(weight)
            gradient[transport.rank] = 0.999 * np.sqrt(sum(counts) / counts[transport.rank])
            (weight @ gradient).backward()
            optimizer.step()
        return weight.detach()

    for moved in threads(ranks, program):
        assert float(moved.norm()) == pytest.approx(0.999)


def test_single_rank_clips_after_a_skipped_step():
    weight = torch.nn.Parameter(torch.zeros(4))
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), local_clip_norm=1.0)
        for value in (float("nan"), 100.0):
            weight.grad = torch.full((4,), value)
            optimizer.step()
    assert float(weight.detach().norm()) == pytest.approx(1.0)


def test_gradients_after_a_skipped_and_cleared_exchange_may_be_stepped_as_they_are():
    weight = torch.nn.Parameter(torch.zeros(4))
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.grad = torch.full((4,), float("nan"))
        optimizer.synchronize()
        optimizer.zero_grad()
        weight.grad = torch.ones(4)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert torch.equal(weight.detach(), -torch.ones(4))


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.1)], ids=repr)
def test_changing_loss_scale_does_not_rescale_the_residual(threads, compression):
    """With the scaler passed in, results equal those without one: powers of 2 are exact."""

    def program(transport: LocalTransport, scales: list[float] | None) -> Any:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scales is not None)
            optimizer = distribute(model, compression, scaler=scaler)
            for step in range(5):
                optimizer.zero_grad()
                scaler.scale(value(model, transport.rank, step)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update(scales[step] if scales else None)
        return flat(model), held(optimizer)

    scaled = threads(3, lambda t: program(t, [4.0, 65536.0, 2.0, 1024.0, 0.5]))
    plain = threads(3, lambda t: program(t, None))
    for one, other in zip(scaled, plain, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1].tobytes() == other[1].tobytes()


def test_scaler_step_before_synchronize_raises_with_advice(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu")
            optimizer = distribute(model, scaler=scaler)
            scaler.scale(value(model, transport.rank, 0)).backward()
            with pytest.raises(ValueError, match=r"synchronize\(\)"):
                scaler.step(optimizer)

    threads(2, program)


def test_scaler_step_of_a_fused_optimizer_before_synchronize_raises(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu")
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, fused=True))
            scaler.scale(value(model, transport.rank, 0)).backward()
            with pytest.raises(ValueError, match=r"unscales when it steps. Use\n.*synchronize\(\)"):
                scaler.step(optimizer)
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)

    threads(2, program)


def test_step_skipped_by_a_scaler_on_one_rank_only_is_warned_of(threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            optimizer = distribute(model)
            scaler.scale(value(model, transport.rank, 0)).backward()
            if transport.rank == 1:
                next(model.parameters()).grad[0] = torch.inf
                scaler.step(optimizer)
            optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    (record,) = [r for r in caplog.records if "cleared without a step" in r.getMessage()]
    assert record.getMessage().startswith("rank 1: ")
    assert "scaler.unscale_(optimizer)" in record.getMessage()
    assert not vars(record).keys() & EVERYWHERE.keys()  # else rank 1 would not print it


def test_gradients_dropped_after_synchronize_are_not_exchanged_again(threads):
    """Sharpness-aware minimization reads the reduced gradient, and computes another one."""

    def program(transport: LocalTransport, synchronizes: bool) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model)
            if synchronizes:
                value(model, transport.rank, 0).backward()
                optimizer.synchronize()
                optimizer.zero_grad()
            value(model, transport.rank, 1).backward()
            optimizer.step()
        return flat(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after_drop = threads(2, partial(program, synchronizes=True))
    for replica, expected in zip(
        after_drop, threads(2, partial(program, synchronizes=False)), strict=True
    ):
        assert torch.equal(replica, expected)


def test_unknown_scaler_may_unscale_before_the_reduction(threads):
    """Early buckets were exchanged scaled; the values at the end count."""

    def program(transport: LocalTransport, scale: bool) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale)
            optimizer = distribute(model, Compression.gtopk(0.1))
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(value(model, transport.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
        return flat(model)

    scaled, plain = (threads(2, lambda t, s=s: program(t, s))[0] for s in (True, False))
    assert torch.equal(scaled, plain)


def test_diverged_replicas_raise_with_parameter_and_ranks(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1), check_every=2)
            for step in range(6):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                if step == 4 and transport.rank == 2:
                    with torch.no_grad():
                        model[2].weight[3, 1] += 1e-9
                        model[3].bias[0] += 1
                if step == 5:
                    with pytest.raises(
                        HorovodInternalError, match=r"'2\.weight'.*ranks 0, 1: .*; rank 2: "
                    ):
                        optimizer.step()
                else:
                    optimizer.step()

    threads(3, program)


def test_skipped_steps_in_a_row_beyond_max_skipped_steps_raise(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, max_skipped_steps=2)
            for step in range(6):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                if step != 2 and transport.rank == 0:
                    model[0].bias.grad.fill_(float("inf"))
                if step == 5:
                    with pytest.raises(FloatingPointError, match=r"3 steps in a row.*'0\.bias'"):
                        optimizer.step()
                else:
                    optimizer.step()
            assert optimizer.skipped_steps == 5

    threads(2, program)


@pytest.mark.parametrize(("options", "allowed"), [({}, 20), ({"max_skipped_steps": 0}, 0)])
def test_skipped_steps_error_names_rank_parameter_and_step(threads, options, allowed):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, **options)
            for step in range(allowed + 1):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                if transport.rank == 1:
                    model[0].bias.grad[0] = float("nan")
                if step < allowed:
                    optimizer.step()
            text = rf"{allowed + 1} steps .* at step {allowed}, .* on rank 1: '0\.bias'; max_"
            with pytest.raises(FloatingPointError, match=text):
                optimizer.step()

    threads(2, program)


@pytest.mark.parametrize("finite_below", [1.0, 2.0**10])
def test_grad_scaler_finds_its_scale_within_max_skipped_steps(threads, finite_below):
    """From its initial scale, if unscaled gradients are finite."""

    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            scaler = torch.amp.GradScaler("cpu")
            optimizer = distribute(model, scaler=scaler)
            while not optimizer.skipped_steps or optimizer.last_step.skipped:
                optimizer.zero_grad()
                scaler.scale(value(model, transport.rank, 0)).backward()
                if scaler.get_scale() > finite_below:
                    model[0].bias.grad.fill_(float("inf"))
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == finite_below
            assert optimizer.skipped_steps == 16 - math.log2(finite_below)

    threads(2, program)


def step_with_ones(optimizer, parameter):
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("density", "warned"), [(0.001, True), (1.0, False)])
def test_density_that_sends_too_few_entries_is_warned_of(caplog, density, warned):
    parameter = torch.nn.Parameter(torch.zeros(10_000))
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.1), compression=Compression.gtopk(density)
        )
        assert not caplog.text  # a mode of adapt may exchange nothing
        step_with_ones(optimizer, parameter)
        step_with_ones(optimizer, parameter)
    assert caplog.text.count("leaves 10 of 10,000 entries") == warned
    assert ("use density=0.05 or more" in caplog.text) == warned


class Lars(torch.optim.SGD):
    """LARS's options: it scales whole tensors, so it has an eps, too."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([{"params": parameters, "eps": 1e-8}], lr=lr)


@pytest.mark.parametrize(
    ("kind", "compression", "warned"),
    [
        (torch.optim.NAdam, Compression.gtopk(0.1), True),
        (torch.optim.AdamW, Compression.gtopk(0.1), False),
        (torch.optim.NAdam, Compression.gtopk(1.0), False),
        (torch.optim.Adamax, Compression.auto(), True),
        (torch.optim.RMSprop, Compression.gtopk(0.1), True),
        (torch.optim.Adagrad, Compression.gtopk(0.1), True),
        (torch.optim.Adadelta, Compression.gtopk(0.1), True),
        (torch.optim.Rprop, Compression.gtopk(0.1), True),
        (Lars, Compression.gtopk(0.1), False),
        (torch.optim.RMSprop, Compression.fp16, False),
        (torch.optim.AdamW, Compression.fp16, False),
        (torch.optim.SGD, Compression.topk(0.1), False),
    ],
)
def test_optimizers_that_adapt_to_past_updates_are_warned_of_after_compression(
    caplog, kind, compression, warned
):
    parameter = torch.nn.Parameter(torch.zeros(10_000))
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(kind([parameter], lr=0.1), compression=compression)
        step_with_ones(optimizer, parameter)
    assert (f"{kind.__name__} after compression loses accuracy" in caplog.text) == warned
    assert ("AdamW with Compression.shards() and adam_steps='before'" in caplog.text) == warned
    # A tenth of the entries, and twice as many updated.
    is_scaled = compression == Compression.gtopk(0.1) and kind is not torch.optim.Rprop
    assert ("the lr (up to 2.2 times)" in caplog.text) == (warned and is_scaled)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_are_warned_of_only_with_sparse_as_dense(caplog, sparse_as_dense):
    table = torch.nn.Embedding(1000, 2, sparse=True)
    inner = torch.optim.SparseAdam(table.parameters())
    options: dict[str, Any] = {"sparse_as_dense": sparse_as_dense}
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(inner, compression=Compression.gtopk(0.1), **options)
        table(torch.arange(3)).sum().backward()
        optimizer.step()
    assert ("SparseAdam after compression" in caplog.text) == sparse_as_dense
    assert ("leaves 200 of 2,000 entries" in caplog.text) == sparse_as_dense


@pytest.mark.parametrize(
    ("kind", "options", "compression", "advice"),
    [
        ("SGD", {"momentum": 0.9}, Compression.gtopk(0.1), "momentum=0 ('"),
        ("SGD", {"momentum": 0.9}, Compression.auto(), "momentum=0 ('"),
        (
            "SGD",
            {"momentum": 0.9, "weight_decay": 1e-4},
            Compression.gtopk(0.1),
            "momentum=0, and 10 times the weight_decay ('",
        ),
        ("SGD", {"momentum": 0.9}, Compression.fp16, ""),
        ("SGD", {"momentum": 0.9}, Compression.gtopk(1.0), ""),
        ("SGD", {"momentum": 0.9, "nesterov": True}, Compression.gtopk(0.1), ""),
        ("SGD", {"momentum": 0.9, "dampening": 0.9}, Compression.gtopk(0.1), ""),
        ("SGD", {}, Compression.gtopk(0.1), ""),
        ("SGD", {}, Compression.gtopk(0.1, momentum_correction=0.9), ""),
        ("SGD", {}, Compression.gtopk(0.1, adam_correction=(0.9, 0.999)), ""),
        ("RMSprop", {"momentum": 0.9}, Compression.gtopk(0.1), ""),
    ],
)
def test_sgd_momentum_after_compression_logs_advice(caplog, kind, options, compression, advice):
    parameter = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **options)
    with caplog.at_level("INFO", "gtopk"), world.entered(local_world(1)[0]):
        step_with_ones(DistributedOptimizer(optimizer, compression=compression), parameter)
    assert ("SGD's momentum of 0.9" in caplog.text) == bool(advice)
    assert advice in caplog.text


def test_advised_momentum_correction_trains_alike_at_density_1():
    """Weight decay, too: momentum sums it up tenfold, so without momentum use ten times as much."""

    def train_sgd(momentum: float, weight_decay: float, **options: Any) -> float:
        parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        sgd = torch.optim.SGD([parameter], 1e-3, momentum, weight_decay=weight_decay)
        with world.entered(local_world(1)[0]):
            optimizer = DistributedOptimizer(sgd, compression=Compression.gtopk(1.0, **options))
            for _ in range(600):
                parameter.grad = torch.full_like(parameter, 0.1)
                optimizer.step()
        return parameter[0].item()

    behind, before = train_sgd(0.9, 0.1), train_sgd(0.0, 1.0, momentum_correction=0.9)
    assert behind == pytest.approx(before, abs=0.01)
    assert behind < train_sgd(0.0, 0.1, momentum_correction=0.9) - 0.1


def train(
    transport: LocalTransport, autocast: bool = False, compiled: bool = False
) -> torch.Tensor:
    """Return a model's weights after three steps."""
    model = network().float()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with world.entered(transport):
        optimizer = distribute(model, Compression.gtopk(0.2))
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(torch.randn(4, 3, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
        assert optimizer._reducer.overlap.is_on
    return flat(model)


def test_autocast_keeps_replicas_equal(threads):
    replicas = threads(3, lambda transport: train(transport, autocast=True))
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert not torch.equal(replicas[0], flat(network().float()))


def test_compiled_model_trains_as_the_plain_one(threads):
    """On one rank, as only one thread may compile at a time."""
    (plain,), (compiled,) = (
        threads(1, lambda transport, c=c: train(transport, compiled=c)) for c in (False, True)
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    moved = (plain - flat(network().float())).abs()
    assert int((moved > 1e-3).sum()) > 0.2 * len(moved)
