"""Layers frozen and unfrozen during training are skipped while frozen, and lose nothing."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, flat, inputs, layers, take_steps


def residual_of(optimizer: Any, name: str) -> torch.Tensor:
    return optimizer._reducer.export_state()[0][name]["residual"]


@pytest.mark.parametrize("one_bucket", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_frozen_layer_keeps_its_values_and_residual(threads, kind, one_bucket):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                kind(model.parameters(), lr=0.01, weight_decay=0.1),
                model.named_parameters(),
                Compression.gtopk(0.2),
                bucket_bytes=None if one_bucket else 1,
            )
            take_steps(model, optimizer, transport.rank, range(4))
            optimizer.zero_grad()
            model[2].requires_grad_(False)
            frozen, kept = model[2].weight.clone(), residual_of(optimizer, "2.weight")
            assert kept.any()
            take_steps(model, optimizer, transport.rank, range(4, 10))
            assert torch.equal(model[2].weight, frozen)
            assert torch.equal(residual_of(optimizer, "2.weight"), kept)
            model[2].requires_grad_(True)
            take_steps(model, optimizer, transport.rank, range(10, 11))
            assert not torch.equal(model[2].weight, frozen)
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)


def test_shared_adam_state_of_an_unused_layer_is_unchanged(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(model.parameters(), lr=0.01),
                model.named_parameters(),
                Compression.gtopk(0.2),
            )
            take_steps(model, optimizer, transport.rank, range(4))
            before = copy.deepcopy(dict(optimizer.state[model[2].weight]))
            part = torch.nn.Sequential(model[0], model[1], model[3])
            take_steps(part, optimizer, transport.rank, range(4, 6))
            after = optimizer.state[model[2].weight]
            assert "shared_exp_avg_sq" in before
            for name, value in before.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[name])), name

    threads(2, program)


@pytest.mark.parametrize("bucket_bytes", [None, 1])
@pytest.mark.parametrize("is_used_again", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_skipped_step_keeps_the_residual_of_an_unused_layer(
    threads, kind, is_used_again, bucket_bytes
):
    """Also if other buckets were exchanged before; the first layer's bucket comes last."""

    def train(is_skipped: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
            model = layers()
            part = torch.nn.Sequential(model[0], model[1], model[3])
            with world.entered(transport):
                optimizer = DistributedOptimizer(
                    kind(model.parameters(), lr=0.01, weight_decay=0.1),
                    model.named_parameters(),
                    Compression.gtopk(0.2),
                    bucket_bytes=bucket_bytes,
                )
                take_steps(model, optimizer, transport.rank, range(4))
                take_steps(part, optimizer, transport.rank, range(4, 5))
                if is_skipped:
                    spoil = model[0].weight.register_hook(lambda gradient: gradient * torch.nan)
                    take_steps(part, optimizer, transport.rank, range(5, 6))
                    spoil.remove()
                again = model if is_used_again else part
                take_steps(again, optimizer, transport.rank, range(5, 9))
                return flat(model), residual_of(optimizer, "2.weight")

        return threads(2, program)

    for (model, kept), (other, also_kept) in zip(train(False), train(True), strict=True):
        assert kept.any()
        assert torch.equal(kept, also_kept)
        assert torch.equal(model, other)


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.3)], ids=repr)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("first", [0, 2])
def test_gradient_present_when_its_layer_is_frozen_is_reduced(threads, compression, passes, first):
    """Torch's optimizers step every parameter with a gradient, frozen or not."""

    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, compression, backward_passes_per_step=passes)
            for step in range(4):
                optimizer.zero_grad()
                for one in range(passes):
                    loss = model(inputs(transport.rank, 10 * step + one)).square().sum()
                    loss.backward()
                    if step == first and one == 0:
                        model[1].requires_grad_(False)
                optimizer.step()
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)


def test_completely_frozen_model_stays_unchanged(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, transport.rank, range(3))
            optimizer.zero_grad()
            frozen = flat(model.requires_grad_(False))
            for _ in range(3):
                optimizer.step()
            assert torch.equal(flat(model), frozen)
            take_steps(model.requires_grad_(True), optimizer, transport.rank, range(3, 5))
            assert not torch.equal(flat(model), frozen)

    threads(2, program)


def test_layer_may_be_frozen_in_a_dense_run_while_a_rank_has_joined(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model, Compression.none)
            take_steps(model, optimizer, transport.rank, range(2))
            if transport.rank == 0:
                model[0].requires_grad_(False)
                take_steps(model, optimizer, transport.rank, range(2, 4))
            here.engine.join().wait()

    threads(2, program)


def test_loaded_residual_of_a_frozen_layer_waits(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, transport.rank, range(4))
            state, kept = optimizer.state_dict(), residual_of(optimizer, "1.weight")
            model = layers()
            model[1].requires_grad_(False)
            optimizer = distribute(model)
            optimizer.load_state_dict(state)
            take_steps(model, optimizer, transport.rank, range(4, 6))
            assert torch.equal(residual_of(optimizer, "1.weight"), kept)
            saved = optimizer.state_dict()["gtopk"]["held"][transport.rank]
            assert torch.equal(saved["1.weight"]["residual"], kept)

    threads(2, program)


def test_residuals_of_unknown_names_are_warned_of_once(threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, transport.rank, range(3))
            state = optimizer.state_dict()
            model = layers()
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                [(f"other.{name}", p) for name, p in model.named_parameters()],
                Compression.gtopk(0.3),
            )
            optimizer.load_state_dict(state)
            take_steps(model, optimizer, transport.rank, range(3))
            model[0].requires_grad_(False)
            take_steps(model, optimizer, transport.rank, range(3, 5))

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    messages = [
        r.getMessage() for r in caplog.records if "no parameter of that name" in r.getMessage()
    ]
    assert sorted(text[:7] for text in messages) == ["rank 0:", "rank 1:"]
    assert "'0.weight', '1.weight', '2.weight', '3.weight'" in messages[0]


METHODS = {
    "gtopk": Compression.gtopk(0.2),
    "topk": Compression.topk(0.2),
    "oktopk": Compression.oktopk(0.2),
    "hierarchical": Compression.hierarchical(0.2, node_size=2),
    "dense inside": Compression.hierarchical(0.2, node_size=2, inside="dense"),
    "momentum correction": Compression.gtopk(0.2, momentum_correction=0.9),
    "factor masking": Compression.topk(0.2, momentum_correction=0.9, factor_masking=True),
    "Adam's moments": Compression.gtopk(0.2, adam_correction=(0.9, 0.99)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_bucket", [True, False])
def test_layer_without_gradient_on_any_rank_keeps_values_and_residual(threads, method, one_bucket):
    """Otherwise its residual alone would move it, apply weight decay, and count as an Adam step."""

    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        is_corrected = "momentum_correction=0.9" in repr(METHODS[method]) or "Adam" in method
        kind = torch.optim.SGD if is_corrected else torch.optim.AdamW
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                kind(model.parameters(), lr=0.01, weight_decay=0.1),
                model.named_parameters(),
                METHODS[method],
                bucket_bytes=None if one_bucket else 1,
            )
            take_steps(model, optimizer, transport.rank, range(4))
            before = [weight.detach().clone() for weight in model.parameters()]
            kept = {what: t.clone() for what, t in residual_state_of(optimizer).items()}
            state = copy.deepcopy(optimizer.state[model[2].weight])
            branch = torch.nn.Sequential(model[0], model[1], model[3])
            for step in range(4, 10):
                take_steps(branch, optimizer, transport.rank, [step])
                assert model[2].weight.grad is None
            assert torch.equal(model[2].weight, before[2])
            assert not torch.equal(model[1].weight, before[1])
            now = residual_state_of(optimizer)
            assert now.keys() == kept.keys()
            assert all(torch.equal(now[what], tensor) for what, tensor in kept.items())
            for what, tensor in state.items():
                assert torch.equal(optimizer.state[model[2].weight][what], tensor), what
            take_steps(model, optimizer, transport.rank, range(10, 14))
            assert not torch.equal(model[2].weight, before[2])
        return flat(model)

    one, *others = threads(4, program)
    assert all(torch.equal(one, other) for other in others)


def residual_state_of(optimizer: Any) -> dict[str, torch.Tensor]:
    return optimizer._reducer.export_state()[0]["2.weight"]


@pytest.mark.parametrize("compression", [Compression.gtopk(0.2), Compression.topk(0.2)], ids=repr)
def test_layer_without_gradient_keeps_its_residual_while_a_rank_has_joined(threads, compression):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model, compression, bucket_bytes=None)
            take_steps(model, optimizer, transport.rank, range(4))
            before = model[2].weight.detach().clone()
            kept = residual_of(optimizer, "2.weight").clone()
            if transport.rank > 0:
                branch = torch.nn.Sequential(model[0], model[1], model[3])
                take_steps(branch, optimizer, transport.rank, range(4, 10))
            here.engine.join().wait()
            assert torch.equal(model[2].weight, before)
            assert torch.equal(residual_of(optimizer, "2.weight"), kept)
        return flat(model)

    _, *others = threads(3, program)
    assert torch.equal(*others)


def test_skipped_or_undone_step_keeps_all_residuals(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, bucket_bytes=None)
            take_steps(model, optimizer, transport.rank, range(4))
            branch = torch.nn.Sequential(model[0], model[1], model[3])
            kept = [residual_of(optimizer, f"{n}.weight").clone() for n in range(4)]
            optimizer.zero_grad()
            (branch(inputs(transport.rank, 4)).sum() * float("nan")).backward()
            optimizer.step()
            optimizer.zero_grad()
            branch(inputs(transport.rank, 5)).sum().backward()
            optimizer.synchronize()
            optimizer.zero_grad()  # without a step, so undone
            now = [residual_of(optimizer, f"{n}.weight") for n in range(4)]
            assert all(map(torch.equal, now, kept))

    threads(2, program)


def test_residual_drained_by_dense_steps_waits_for_a_gradient(threads):
    """A run that continues without compression also sends its residual, completely."""

    def build(compression: Any) -> tuple[Any, Any]:
        model = layers()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, DistributedOptimizer(inner, model.named_parameters(), compression)

    def program(transport: LocalTransport) -> torch.Tensor:
        with world.entered(transport):
            model, sparse = build(Compression.gtopk(0.3))
            take_steps(model, sparse, transport.rank, range(4))
            kept = residual_of(sparse, "2.weight").clone()
            model, dense = build(Compression.none)
            dense.load_state_dict(sparse.state_dict())
            before = model[2].weight.detach().clone()
            branch = torch.nn.Sequential(model[0], model[1], model[3])
            take_steps(branch, dense, transport.rank, range(4, 40))
            assert torch.equal(model[2].weight, before)
            assert torch.equal(residual_of(dense, "2.weight"), kept)
            take_steps(model, dense, transport.rank, range(40, 80))
            assert not dense._reducer.export_state()[0].get("2.weight")
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)
