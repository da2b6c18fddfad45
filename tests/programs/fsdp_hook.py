"""Run under torchrun on 4 ranks: two replicas of a model that two ranks each share."""

from __future__ import annotations

import pytest
import torch
from checks import run_tests
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gtopk.torch as hvd
from gtopk import fsdp

torch.distributed.init_process_group("gloo")
RANK = torch.distributed.get_rank()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(12, 12, dtype=torch.float64) for _ in range(3)))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def sharded(density: float, **options: object) -> tuple[torch.nn.Module, fsdp.ReplicaState]:
    model = network()
    for layer in model:
        fully_shard(layer, mesh=MESH["shard"])
    fully_shard(model, mesh=MESH["shard"])
    return model, fsdp.replicate(model, MESH["replicate"], density, **options)


def loss(model: torch.nn.Module, step: int, rank: int = RANK) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    return model(x).tanh().square().mean()


def train(model: torch.nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters whole; every rank calls it."""
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def reference(steps: range) -> torch.nn.Module:
    """Train on the batches of all ranks in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        (sum(loss(model, step, rank) for rank in range(4)) / 4).backward()
        optimizer.step()
    return model


def test_at_density_1_it_is_training_on_all_batches() -> None:
    model, _ = sharded(1.0)
    train(model, range(4))
    expected = torch.cat([p.detach().reshape(-1) for p in reference(range(4)).parameters()])
    torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=1e-12)


def shard(model: torch.nn.Module) -> torch.Tensor:
    """Return this rank's part of all parameters."""
    return torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()])


def test_replicas_are_alike_and_what_was_not_sent_is_held_back() -> None:
    (model, state), (dense, _) = sharded(0.05), sharded(1.0)
    begun = shard(model)
    train(model, range(1))
    train(dense, range(1))
    others = hvd.allgather(shard(model)[None])
    assert torch.equal(others[RANK], others[(RANK + 2) % 4])
    update, whole = begun - shard(model), begun - shard(dense)
    assert 0 < int((update != 0).sum()) < 0.2 * len(update)
    held = [tensors["residual"].sum() for tensors in state.state_dict()["held"].values()]
    kept = hvd.allreduce(torch.stack(held).sum(), op=hvd.Sum, process_set=state.process_set)
    assert float(update.sum() + 0.1 * kept) == pytest.approx(float(whole.sum()), abs=1e-12)


def test_a_gradient_that_is_not_finite_costs_one_step() -> None:
    model, state = sharded(0.05)
    train(model, range(2))
    held, before = state.state_dict(), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    factor = float("inf") if RANK == 3 else 1.0
    scaler.scale(loss(model, 2) * factor).backward()
    norms = torch.stack([p.grad.full_tensor().sum() for p in model.parameters()])
    assert not bool(norms.isfinite().all())
    assert state.skipped_steps == 1
    after = state.state_dict()
    for name, tensors in held["held"].items():
        assert torch.equal(after["held"][name]["residual"], tensors["residual"]), name
    assert torch.equal(weights(model), before)
    train(model, range(3, 5))
    assert bool(weights(model).isfinite().all())


def test_what_is_held_back_is_saved_and_loaded() -> None:
    model, state = sharded(0.05)
    train(model, range(3))
    saved, begun = state.state_dict(), [p.detach().to_local().clone() for p in model.parameters()]
    train(model, range(3, 6))
    again, resumed = sharded(0.05)
    for parameter, value in zip(again.parameters(), begun, strict=True):
        parameter.detach().to_local().copy_(value)
    resumed.load_state_dict(saved)
    train(again, range(3, 6))
    assert torch.equal(weights(again), weights(model))
    with pytest.raises(ValueError, match="must be of format 1, got 7"):
        resumed.load_state_dict({**saved, "format": 7})
    with pytest.raises(ValueError, match="the number of shards must be what it was"):
        resumed.load_state_dict({**saved, "held": {"0": {"residual": torch.ones(3)}}})


def test_what_is_no_sharded_model_is_refused() -> None:
    with pytest.raises(ValueError, match="call fully_shard before replicate"):
        fsdp.replicate(network(), MESH["replicate"])
    model = network()
    fully_shard(model, mesh=MESH["shard"])
    with pytest.raises(ValueError, match="a mesh of one dimension"):
        fsdp.replicate(model, MESH)


def main() -> None:
    run_tests(globals())
    print(f"rank {RANK}: shards are replicated\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
