"""For 4 ranks of fsdp_checks.py: two replicas of two shards make AdamW's steps by themselves."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import fsdp_hook
import pytest
import torch
from checks import adamw, equal, logged, raises
from fsdp_hook import MESH, RANK, weights
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gtopk
import gtopk.torch as hvd
from gtopk import fsdp
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer

ROWS = 11  # not divisible by two shards
network = partial(fsdp_hook.network, ROWS)
loss = partial(fsdp_hook.loss, rows=ROWS)


def sharded(
    density: float = 0.1, kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[Any, Any, fsdp.ReplicaState]:
    model: Any = network()
    for layer in model:
        fully_shard(layer, mesh=MESH["shard"])
    fully_shard(model, mesh=MESH["shard"])
    optimizer = adamw(model, kind)
    state = fsdp.replicate(model, MESH["replicate"], density, optimizer=optimizer, **options)
    return model, optimizer, state


def train(model: torch.nn.Module, optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def test_saving_between_backward_and_step_is_warned_of() -> None:
    for adam_steps in ("before", "after"):
        model, optimizer, state = sharded(adam_steps=adam_steps)
        train(model, optimizer, range(2))
        assert not logged(state.state_dict)
        optimizer.zero_grad()
        loss(model, 2).backward()
        (message,) = logged(state.state_dict)
        assert message.startswith(f"rank {RANK}: the hook's state is saved between backward()")
        optimizer.step()
        assert not logged(state.state_dict)


def own(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of this rank's shards."""
    return [p.detach().to_local().clone() for p in model.parameters()]


def assert_alike(model: torch.nn.Module) -> None:
    mine = weights(model)
    assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))


def saved(model: torch.nn.Module, optimizer: Any, state: fsdp.ReplicaState) -> Any:
    return copy.deepcopy([own(model), optimizer.state_dict(), state.state_dict()])


def recorded(model: Any, state: fsdp.ReplicaState) -> list[list[torch.Tensor]]:
    """Return a list that gets each layer's gradients of the last pass, as the hook sees them."""
    found: list[list[torch.Tensor]] = [[] for _ in model]

    for number, layer in enumerate(model):
        (unit,) = (unit for unit in state._bucket_exchanges if unit.name == str(number))

        def hook(gradients: torch.Tensor, number: int = number, unit: Any = unit) -> None:
            shapes = [unit.padded[name].shape for name in unit.with_gradient]
            parts = gradients.clone().split([shape.numel() for shape in shapes])
            found[number] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            state.exchange(unit, gradients)

        layer.set_all_reduce_hook(hook)
    return found


def test_fsdp_adamw_is_bit_identical_to_distributed_optimizer_of_each_shard() -> None:
    """With the same gradients, on the ranks that hold the same shard."""
    Adam = torch.optim.Adam
    for density, kind, options in (
        (0.1, torch.optim.AdamW, {}),
        (0.1, Adam, {"wire": "packed", "values": "int8", "local_residual": False}),
        (0.001, torch.optim.AdamW, {"compression": Compression.shards(2, 3)}),
    ):
        ours, optimizer, state = sharded(density, kind, **options)
        gradients = recorded(ours, state)
        local = own(ours)
        parts = [
            torch.nn.Parameter(torch.cat([each, each.new_zeros(6 - len(each), *each.shape[1:])]))
            for each in local
        ]
        theirs = torch.nn.ParameterList(parts)
        other = DistributedOptimizer(
            adamw(theirs, kind),
            theirs.named_parameters(),
            state.compression,
            groups=[parts[first : first + 2] for first in (0, 2, 4)],
            process_set=state.process_set,
            local_residual=False,
        )
        for step in range(5):
            optimizer.zero_grad()
            loss(ours, step).backward()
            optimizer.step()
            other.zero_grad()
            for part, gradient in zip(parts, (g for each in gradients for g in each), strict=True):
                part.grad = gradient.clone()
            other.step()
            for shard, part in zip(own(ours), parts, strict=True):
                assert torch.equal(shard, part.detach()[: len(shard)]), (options, step)
        for parameter, part in zip(ours.parameters(), parts, strict=True):
            shared = optimizer.state[parameter]["shared_exp_avg_sq"]
            assert (shared.shape, shared.placements) == (parameter.shape, parameter.placements)
            rows = optimizer.state[parameter]["shared_row_squares"].to_local()
            assert torch.equal(rows, other.state[part]["shared_row_squares"])
            mine = shared.to_local()
            assert torch.equal(mine, other.state[part]["shared_exp_avg_sq"][: len(mine)])
        assert_alike(ours)


def unsent(model: Any, state: fsdp.ReplicaState) -> torch.Tensor:
    """Return the residuals of this replica's shards, in the parameters' shapes."""
    (held,) = state.state_dict()["held"].values()
    found = []
    for name, parameter in model.named_parameters():
        shard = parameter.to_local()
        part = held[f"{RANK % 2}/{name}"]["residual"][: shard.numel()].view(shard.shape)
        whole = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        found.append(whole.full_tensor().reshape(-1))
    return torch.cat(found)


def test_training_forward_includes_unsent_steps_and_evaluation_does_not() -> None:
    model, optimizer, state = sharded(0.05)
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model):  # after FSDP's own hook, when parameters are gathered

        def look(module: Any, inputs: Any, number: int = number) -> None:
            parts = [p.detach().clone().reshape(-1) for p in module.parameters()]
            seen[number] = torch.cat(parts)

        layer.register_forward_pre_hook(look)

    def whole() -> torch.Tensor:
        return torch.cat([seen[number] for number in range(3)])

    train(model, optimizer, range(3))
    center, applied = weights(model), weights(model) - 2 * unsent(model, state)
    assert not torch.equal(applied, center)
    for _ in range(2):
        loss(model, 3)  # without a backward pass FSDP keeps the last layers gathered
        torch.testing.assert_close(whole(), applied, rtol=1e-12, atol=1e-12)
        model.eval()
        loss(model, 3)
        assert torch.equal(whole(), center)
        model.train()
    with state.evaluating():
        loss(model, 3)
        assert torch.equal(whole(), center)
    optimizer.zero_grad()
    value = loss(model, 3)
    torch.testing.assert_close(whole(), applied, rtol=1e-12, atol=1e-12)
    value.backward()
    optimizer.step()
    assert_alike(model)
    loss(model, 4)
    model.state_dict()
    assert_alike(model)


def test_skipped_adamw_step_of_a_shard_changes_no_state() -> None:
    for has_scaler in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=has_scaler, growth_interval=99)
        model, optimizer, state = sharded(scaler=scaler)
        alone, other, _ = sharded()
        for step in range(6):
            before = saved(model, optimizer, state)
            optimizer.zero_grad()
            bad = torch.inf if (RANK, step) == (3, 3) else 1.0
            scaler.scale(bad * loss(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert equal(saved(model, optimizer, state), before) == (step == 3)
        train(alone, other, [0, 1, 2, 4, 5])
        assert (state.skipped_steps, state.progress.steps) == (1, 5)
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-9, atol=1e-12)
        assert_alike(model)


def test_accumulated_passes_are_one_adamw_step() -> None:
    for way in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        ours, optimizer, _ = sharded()
        theirs, other, _ = sharded()
        for step in range(4):
            optimizer.zero_grad()
            other.zero_grad()
            getattr(ours, way)(False)
            loss(ours, 100 + step).backward()
            getattr(ours, way)(True)
            loss(ours, step).backward()
            (loss(theirs, 100 + step) + loss(theirs, step)).backward()
            optimizer.step()
            other.step()
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-9, atol=1e-12)


def test_resumed_fsdp_adamw_run_is_bit_identical_also_through_dcp() -> None:
    model, optimizer, state = sharded()
    train(model, optimizer, range(4))
    before, shards = copy.deepcopy([optimizer.state_dict(), state.state_dict()]), own(model)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    gtopk.save_checkpoint(f"{folder}/replicas", None, None, step=4, replicas=state)
    train(model, optimizer, range(4, 8))
    for by_torch in (False, True):
        resumed, again, fresh = sharded()
        for parameter, shard in zip(resumed.parameters(), shards, strict=True):
            parameter.detach().to_local().copy_(shard)
        if by_torch:
            loaded = get_optimizer_state_dict(resumed, again)
            dcp.load({"optimizer": loaded}, checkpoint_id=folder)
            set_optimizer_state_dict(resumed, again, loaded)
            gtopk.load_latest(f"{folder}/replicas", None, replicas=fresh)
        else:
            again.load_state_dict(before[0])
            fresh.load_state_dict(before[1])
        train(resumed, again, range(4, 8))
        assert torch.equal(weights(resumed), weights(model)), by_torch
        assert equal(saved(resumed, again, fresh), saved(model, optimizer, state))


def test_plain_adamw_moments_are_taken_over_by_replicas() -> None:
    plain: Any = network()
    for layer in plain:
        fully_shard(layer, mesh=MESH["shard"])
    fully_shard(plain, mesh=MESH["shard"])
    first = adamw(plain)
    for step in range(3):
        first.zero_grad()
        loss(plain, step, rank=RANK % 2).backward()  # as the other replica does
        first.step()
    model, optimizer, _ = sharded(1.0)
    for parameter, shard in zip(model.parameters(), own(plain), strict=True):
        parameter.detach().to_local().copy_(shard)
    optimizer.load_state_dict(first.state_dict())
    optimizer.zero_grad()
    loss(model, 3, rank=RANK % 2).backward()
    optimizer.step()
    first.zero_grad()
    loss(plain, 3, rank=RANK % 2).backward()
    first.step()
    for parameter in model.parameters():
        assert float(optimizer.state[parameter]["step"]) == 4
        assert "exp_avg" not in optimizer.state[parameter]
    torch.testing.assert_close(weights(model), weights(plain), rtol=0.05, atol=0.02)
    assert_alike(model)


class BreaksOff(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("broken off")


def test_state_loaded_after_a_failed_backward_is_what_was_saved() -> None:
    model, optimizer, state = sharded()
    train(model, optimizer, range(3))
    before = saved(model, optimizer, state)
    optimizer.zero_grad()
    broken = model[1].register_forward_hook(lambda *call: BreaksOff.apply(call[2]))
    with pytest.raises(ArithmeticError, match="broken off"):
        loss(model, 3).backward()  # after the last layer, which is being exchanged
    optimizer.load_state_dict(before[1])
    state.load_state_dict(before[2])
    assert equal(saved(model, optimizer, state), before)
    hvd.barrier()
    assert equal(saved(model, optimizer, state), before)
    broken.remove()
    expected = r"after one that ended with an error.* fully_shard"  # FSDP itself cannot continue
    with pytest.raises(RuntimeError, match=expected):
        loss(model, 3).backward()


def test_second_phase_uses_its_own_state_and_optimizer() -> None:
    # The first phase's objects stay alive in reference cycles until they are collected; force it.
    model, optimizer, state = sharded()
    train(model, optimizer, range(3))
    fsdp.replicate(model, MESH["replicate"], 0.1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), range(3, 6))
    assert_alike(model)
    assert state.progress.steps == 3
    del optimizer


def test_clipping_and_unsupported_options_are_refused() -> None:
    model, optimizer, state = sharded()
    loss(model, 0).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
    raises(ValueError, optimizer.step, "clip_grad_norm_", "leave clipping out")
    optimizer.zero_grad()
    loss(model, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # torch does not count this change
    raises(ValueError, optimizer.step, "clip_grad_norm_", "leave clipping out")
    optimizer.zero_grad()
    train(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"set_requires_gradient_sync\(False\).*zero_grad\(\)"):
        loss(model, 1).backward()
    for options, text in (
        ({"optimizer": adamw(network())}, "create the optimizer after fully_shard"),
        (
            {"global_clip_norm": 1.0},
            "global_clip_norm is not supported for replicas of a sharded model",
        ),
        ({"optimizer": torch.optim.SGD(network().parameters()), "local_residual": True}, "=True"),
        ({"compression": Compression.topk(0.1)}, r"replicate takes Compression\.gtopk"),
    ):
        with pytest.raises(ValueError, match=text):
            fsdp.replicate(model, MESH["replicate"], **options)
    assert state.makes_adam_steps
