"""For 4 ranks of fsdp_checks.py, two replicas of two shards: a pass uses some layers of a unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import BETAS
from fsdp_hook import MESH, RANK, weights
from torch.distributed.fsdp import FSDPModule, fully_shard

import gtopk.torch as hvd
from gtopk import fsdp

Uses = tuple[str, ...]  # for each use of the block, the layers that it uses


class Block(torch.nn.Module):
    """Layers with 11 rows, which two shards cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict(
            {name: torch.nn.Linear(11, 11, dtype=torch.float64) for name in "abc"}
        )

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        for name in names:
            x = self.layers[name](x).tanh()
        return x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, x: torch.Tensor, uses: Uses) -> torch.Tensor:
        for names in uses:
            x = self.block(x, names)
        return x


def replicated(
    density: float, *, units_of_their_own: bool = False, **options: Any
) -> tuple[Model, fsdp.ReplicaState]:
    model = Model()
    if units_of_their_own:
        for layer in model.block.layers.values():
            fully_shard(layer, mesh=MESH["shard"])
    fully_shard(model.block, mesh=MESH["shard"])
    fully_shard(model, mesh=MESH["shard"])
    return model, fsdp.replicate(model, MESH["replicate"], density, **options)


def loss(model: Model, uses: Uses, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + RANK)
    x = torch.randn(8, 11, generator=generator, dtype=torch.float64)
    return model(x, uses).square().mean()


def held_back(model: Model, state: fsdp.ReplicaState) -> dict[str, torch.Tensor]:
    """Return the sum over the replicas of each parameter's residual, in its shard's shape."""
    (held,) = state.state_dict()["held"].values()
    found = {}
    for name, parameter in model.named_parameters():
        shard = parameter.to_local()
        own = held.get(f"{RANK % 2}/{name}", {}).get("residual")
        own = torch.zeros(shard.numel(), dtype=shard.dtype) if own is None else own
        assert not own[shard.numel() :].any()  # the padding
        own = own[: shard.numel()].view_as(shard)
        found[name] = hvd.allreduce(own, op=hvd.Sum, process_set=state.process_set)
    return found


def gradients(model: Model) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p.to_local()) if p.grad is None else p.grad.to_local()
        for name, p in model.named_parameters()
    }


def test_layers_used_in_turn_train_like_separate_fsdp_units() -> None:
    trained = []
    for units_of_their_own in (False, True):
        model, _ = replicated(0.05, units_of_their_own=units_of_their_own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, layer in enumerate("abacbabc"):
            optimizer.zero_grad()
            loss(model, (layer,), step).backward()
            optimizer.step()
        trained.append(weights(model))
    assert torch.equal(*trained)


def test_adam_bias_correction_counts_each_layers_own_steps() -> None:
    trained = []
    for units_of_their_own in (False, True):
        model, _ = replicated(1.0, units_of_their_own=units_of_their_own, adam_correction=BETAS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, layers in enumerate(("a", "a", "ab", "b", "abc", "bc", "abc")):
            optimizer.zero_grad()
            loss(model, (layers,), step).backward()
            optimizer.step()
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=1e-10, atol=1e-12)


def check_nothing_is_lost(
    model: Model, state: fsdp.ReplicaState, dense: Model, before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compare a pass with that of a model that sends everything; return the residual after it."""
    update, whole, after = gradients(model), gradients(dense), held_back(model, state)
    for name in update:
        torch.testing.assert_close(
            update[name] + after[name], whole[name] + before[name], rtol=1e-12, atol=1e-12
        )
    return after


def test_gradient_is_conserved_whichever_layers_are_used_or_frozen() -> None:
    (model, state), (dense, _) = replicated(0.05), replicated(1.0)
    passes: list[tuple[Uses, str]] = [  # the layers used, and which of them are frozen
        (("ab",), ""),
        (("b",), ""),
        (("abc",), "a"),
        (("abc",), ""),
        (("ab", "bc"), ""),
        (("ac", "bc", "ac"), ""),
        (("abc", "ab"), "b"),
        (("c",), ""),
        (("abc",), ""),
    ]
    for step, (uses, frozen) in enumerate(passes):
        before = held_back(model, state)
        for each in (model, dense):
            for name, module in each.block.layers.items():
                module.requires_grad_(name not in frozen)
            each.zero_grad()
            loss(each, uses, step).backward()
        after = check_nothing_is_lost(model, state, dense, before)
        for name in after:
            layer = name.split(".")[2]
            if layer not in "".join(uses) or layer in frozen:
                assert torch.equal(after[name], before[name])
    assert state.progress.steps == len(passes)


def test_gradients_of_earlier_passes_are_exchanged_with_the_last_one() -> None:
    trained = []
    for wait in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        for units_of_their_own in (False, True):
            model, state = replicated(1.0, units_of_their_own=units_of_their_own)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step, uses in enumerate((("ab", "c", "b"), ("a", "ab", "bc"), ("abc", "b", "a"))):
                optimizer.zero_grad()
                for part, layers in enumerate(uses):
                    getattr(model, wait)(part == 2)
                    loss(model, (layers,), 3 * step + part).backward()
                optimizer.step()
            trained.append(weights(model))
            assert state.progress.steps == 3
    for other in trained[1:]:
        torch.testing.assert_close(trained[0], other, rtol=1e-12, atol=1e-12)


def test_residual_of_layers_used_twice_is_kept_after_a_skipped_pass() -> None:
    model, state = replicated(0.05)
    loss(model, ("abc",), 0).backward()
    before = held_back(model, state)
    for step, uses in enumerate((("ab", "bc"), ("bc", "ab"), ("c", "ab"))):
        model.zero_grad()
        (loss(model, uses, step) * (torch.inf if RANK == 3 else 1.0)).backward()
        assert state.skipped_steps == step + 1
        after = held_back(model, state)
        assert all(torch.equal(after[name], part) for name, part in before.items())
    assert all(part.any() for part in before.values())


def test_replicas_that_use_different_layers_get_an_error() -> None:
    model, _ = replicated(0.05)
    expected = r"disagree about .*gradients of block\.layers\.a\.weight, .*block\.layers\.b\.weight"
    with pytest.raises(hvd.HorovodInternalError, match=expected):
        loss(model, ("ab"[RANK // 2],), 0).backward()


def test_replicas_may_use_different_layers_if_fsdp_reduces_zeros() -> None:
    """Then the residual of layers that nobody uses is sent, too."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # torch 2.13 has it
    (model, state), (dense, _) = replicated(0.2), replicated(1.0)
    passes = ("abc", 1.0), ("ac"[RANK // 2], 1.0), *(("a", 0.0),) * 15
    for step, (layers, scale) in enumerate(passes):
        before = held_back(model, state)
        for each in (model, dense):
            each.set_reduce_scatter_unused_params(True)
            each.zero_grad()
            (loss(each, (layers,), step) * scale).backward()
        after = check_nothing_is_lost(model, state, dense, before)
        assert step > 1 or after["block.layers.c.weight"].any()
    assert not any(map(torch.Tensor.any, after.values()))
