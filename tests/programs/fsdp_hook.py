"""For 4 ranks of fsdp_checks.py: two replicas of a model, each sharded over two ranks."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
from functools import partial

import pytest
import torch
import torch._dynamo.config  # before any optimizer: models are compiled here
from checks import BETAS, logged, raises, train_beside_adamw
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import gtopk
import gtopk.torch as hvd
from gtopk import fsdp
from gtopk.torch.checkpoint.dcp import Reader, Writer

torch.distributed.init_process_group("gloo")
RANK = torch.distributed.get_rank()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def network(rows: int = 12) -> torch.nn.Module:
    layers = (torch.nn.Linear(rows, rows, dtype=torch.float64) for _ in range(3))
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def sharded(density: float, **options: object) -> tuple[torch.nn.Module, fsdp.ReplicaState]:
    model = network()
    for layer in model:
        fully_shard(layer, mesh=MESH["shard"])
    fully_shard(model, mesh=MESH["shard"])
    return model, fsdp.replicate(model, MESH["replicate"], density, **options)


def loss(model: torch.nn.Module, step: int, rank: int = RANK, rows: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, rows, generator=generator, dtype=torch.float64)
    return model(x).tanh().square().mean()


def train(model: torch.nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters, gathered; every rank calls it."""
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


def test_replicas_at_density_1_equal_training_on_all_batches() -> None:
    model, _ = sharded(1.0)
    train(model, range(4))
    expected = torch.cat([p.detach().reshape(-1) for p in reference(range(4)).parameters()])
    torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=1e-12)


class Checkpointed(torch.nn.Sequential):
    """Recomputes each layer's activations in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(*network())
        self.again = partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = self.again(layer, x.requires_grad_()).tanh()
        return x


def replicated(model: torch.nn.Sequential) -> fsdp.ReplicaState:
    for layer in model:
        fully_shard(layer, mesh=MESH["shard"])
    fully_shard(model, mesh=MESH["shard"])
    return fsdp.replicate(model, MESH["replicate"], 0.1)


def test_adam_correction_at_density_1_equals_adamw_for_equal_gradients() -> None:
    model, _ = sharded(1.0, adam_correction=BETAS)
    alone = network()
    train_beside_adamw(model, alone, lambda each, step: loss(each, step, rank=0))
    expected = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
    torch.testing.assert_close(weights(model), expected, rtol=1e-10, atol=1e-12)


def test_activation_checkpointing_leaves_a_pass_one_step() -> None:
    model = Checkpointed(use_reentrant=False)
    state = replicated(model)
    train(model, range(3))
    assert (state.progress.steps, state.skipped_steps) == (3, 0)


def test_reentrant_checkpointing_is_refused_on_all_ranks() -> None:
    model = Checkpointed(use_reentrant=True)
    replicated(model)
    with pytest.raises(RuntimeError, match=r"within another one.* use_reentrant=False"):
        train(model, range(1))


def shard(model: torch.nn.Module) -> torch.Tensor:
    """Return this rank's part of all parameters."""
    return torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()])


def residuals(state: fsdp.ReplicaState) -> dict[str, torch.Tensor]:
    """Return this rank's residual, by parameter."""
    (held,) = state.state_dict()["held"].values()
    return {name: tensors["residual"] for name, tensors in held.items()}


def test_replicas_stay_equal_and_keep_unsent_entries_in_the_residual() -> None:
    (model, state), (dense, _) = sharded(0.05), sharded(1.0)
    begun = shard(model)
    train(model, range(1))
    train(dense, range(1))
    others = hvd.allgather(shard(model)[None])
    assert torch.equal(others[RANK], others[(RANK + 2) % 4])
    update, whole = begun - shard(model), begun - shard(dense)
    assert 0 < int((update != 0).sum()) < 0.2 * len(update)
    held = residuals(state)
    names = [f"{RANK % 2}/{name}" for name, _ in model.named_parameters()]
    mine = torch.cat([held[name].reshape(-1) for name in names])
    kept = hvd.allreduce(mine, op=hvd.Sum, process_set=state.process_set)
    torch.testing.assert_close(update + 0.1 * kept, whole, rtol=1e-12, atol=1e-14)


def spoil(factors: torch.Tensor, module: object, x: object, y: torch.Tensor) -> None:
    """Multiply the gradient of a layer's output."""
    y.register_hook(lambda gradient: gradient * factors)


def test_nonfinite_gradient_of_one_shard_skips_one_step() -> None:
    """Also if it is in one row of one shard, which the other shard's replicas do not see."""
    ways = (False, torch.inf), (False, torch.nan), (True, torch.inf), (True, torch.nan)
    for (has_scaler, factor), row in itertools.product(ways, (slice(None), 0, 11)):
        model, state = sharded(0.05)
        train(model, range(2))
        optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in model]
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=has_scaler)
        held, before = residuals(state), weights(model)
        for step in (2, 3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # In the first layer, which comes last: the others are already exchanged.
            factors = torch.ones(12, dtype=torch.float64)
            factors[row] = factor if (RANK, step) == (3, 2) else 1.0
            hook = model[0].register_forward_hook(partial(spoil, factors))
            scaler.scale(loss(model, step)).backward()
            hook.remove()
            assert state.skipped_steps == 1
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            same = all(map(torch.equal, residuals(state).values(), held.values()))
            assert same == torch.equal(weights(model), before) == (step == 2)
        assert state.progress.steps == 3
        assert bool(weights(model).isfinite().all())


def test_exceeding_max_skipped_steps_is_an_error_on_every_rank() -> None:
    model, state = sharded(0.05, max_skipped_steps=1)

    def backward(factor: float) -> None:
        model.zero_grad()
        (loss(model, 0) * (factor if RANK == 3 else 1.0)).backward()

    for factor in (torch.nan, 1.0, torch.nan):
        backward(factor)
    why = "a gradient is not finite on rank 2 and rank 3"  # both reduced it
    with pytest.raises(FloatingPointError, match=rf"2 steps in a row.* at step \d+, .*{why}"):
        backward(torch.inf)
    assert (state.skipped_steps, state.progress.steps) == (3, 1)
    state.load_state_dict(state.state_dict())
    backward(torch.inf)  # skips before a load do not count as consecutive with later ones
    assert state.skipped_steps == 4
    model.zero_grad()
    train(model, range(2))
    assert state.progress.steps == 3


def test_passes_accumulated_onto_skipped_gradients_skip_only_that_step() -> None:
    """Also if some belong to no optimizer, and stay NaN because nobody clears them."""
    model, state = sharded(0.05)
    train(model, range(2))
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    held, before = residuals(state), weights(model)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        for part in range(2):  # each pass reduces its gradients, which accumulate
            is_spoilt = (RANK, step, part) == (3, 0, 0)
            (loss(model, 2 * step + part) * (torch.inf if is_spoilt else 1.0)).backward()
        optimizer.step()
        same = all(map(torch.equal, residuals(state).values(), held.values()))
        assert same == torch.equal(weights(model), before) == (step == 0)
        assert state.skipped_steps == 2
    assert state.progress.steps == 6
    assert bool(weights(model).isfinite().all())


def test_passes_accumulated_before_reduction_are_one_step() -> None:
    model, state = sharded(0.05)
    for is_spoilt in (True, False):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        (loss(model, 0) * (torch.inf if is_spoilt and RANK == 3 else 1.0)).backward()
        model.set_requires_gradient_sync(True)
        loss(model, 1).backward()
        assert (state.skipped_steps, state.progress.steps) == (1, 1 - is_spoilt)


def test_gradients_accumulated_within_a_replica_are_exchanged_once() -> None:
    trained = []
    for wait in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model, state = sharded(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 1)
            for part in range(3):
                getattr(model, wait)(part == 2)
                before = state.progress.steps
                loss(model, 3 * step + part).backward()
                assert state.progress.steps - before == (part == 2)
                if step != 2 and part != 2:  # .grad has none before the reduction
                    assert all(
                        p.grad is None or not p.grad.to_local().any() for p in model.parameters()
                    )
            optimizer.step()
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=1e-12, atol=1e-12)


def test_nonfinite_sum_within_a_replica_skips_one_step() -> None:
    model, state = sharded(0.05)
    train(model, range(2))
    held = residuals(state)
    for is_spoilt in (True, False):
        model.zero_grad()
        model.set_requires_all_reduce(False)
        (loss(model, 2) * (torch.inf if is_spoilt and RANK == 3 else 1.0)).backward()
        assert state.progress.steps == 2
        model.set_requires_all_reduce(True)
        loss(model, 3).backward()
        assert (state.skipped_steps, state.progress.steps) == (1, 3 - is_spoilt)
        assert all(map(torch.equal, residuals(state).values(), held.values())) == is_spoilt


def test_loading_a_state_discards_gradients_not_exchanged_yet() -> None:
    (model, state), (other, expected) = sharded(0.05), sharded(0.05)
    model.set_requires_all_reduce(False)
    loss(model, 7).backward()
    model.set_requires_all_reduce(True)
    state.load_state_dict(expected.state_dict())
    for each in (model, other):
        train(each, range(1))
    assert torch.equal(weights(model), weights(other))


def test_drop_skipped_clears_only_its_model_without_resharding() -> None:
    (model, state), (other, _) = sharded(0.05), sharded(0.05)
    (mine, others) = ([*each.parameters()] for each in (model, other))
    optimizer = torch.optim.SGD([*mine, *others], lr=0.1)
    for each in (model, other):
        each.set_reshard_after_backward(False)
        factor = torch.nan if (each, RANK) == (model, 3) else 1.0
        hook = each[0].register_forward_hook(partial(spoil, torch.tensor(factor)))
        loss(each, 0).backward()
        hook.remove()
        assert not any(isinstance(parameter, DTensor) for parameter in each.parameters())
    assert state.skipped_steps == 1
    assert all(bool(parameter.grad.to_local().isnan().all()) for parameter in mine)
    state.drop_skipped(optimizer)
    assert all(parameter.grad is None for parameter in mine)
    assert all(bool(parameter.grad.to_local().isfinite().all()) for parameter in others)
    again = fsdp.replicate(model, MESH["replicate"], 0.05)  # while parameters are gathered
    loss(model, 1).backward()
    assert again.progress.steps == 1


def test_resumed_run_with_adam_correction_is_bit_identical() -> None:
    correction = {"adam_correction": (0.9, 0.99)}
    (model, state), (again, resumed) = (sharded(0.05, **correction) for _ in range(2))
    train(model, range(3))
    for parameter, trained in zip(again.parameters(), model.parameters(), strict=True):
        parameter.detach().to_local().copy_(trained.detach().to_local())
    resumed.load_state_dict(state.state_dict())
    for each in (model, again):
        train(each, range(3, 6))
    assert torch.equal(weights(again), weights(model))


def test_resumed_replicas_are_bit_identical_and_bad_states_are_refused() -> None:
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
    for wrong, expected in (
        ({"format": 7}, "must be of format 1, got 7"),
        ({"shards": 3}, "saved with 3 shards, but the model has 2: load it with the same number"),
        *(
            (
                {"held": {RANK: {f"{RANK % 2}/{name}": {"residual": torch.ones(3)}}}},
                rf"the residual of the shard of '{name}' has the shape \[3\], "
                rf"expected \[{length}\]",
            )
            for name, length in (("0.weight", 72), ("0", 78))
        ),
        ({"held": {RANK: {f"{1 - RANK % 2}/0": {}}}}, "each replica has consecutive ranks"),
        ({"steps": None}, "the steps of a rank's residual is None"),
    ):
        with pytest.raises(ValueError, match=expected):
            resumed.load_state_dict({**saved, **wrong})


def test_sharded_compression_conserves_gradient_and_resumes_bit_identically() -> None:
    """Each rank exchanges rotating shards of the values in its shard of the model."""
    shards = hvd.Compression.shards(2, 3)

    def kept(state: fsdp.ReplicaState) -> torch.Tensor:
        """Return what both replicas have not sent, summed; owner errors included."""
        (held,) = state.state_dict()["held"].values()
        own = [held[name]["residual"] + held[name]["owner_error"] for name in sorted(held)]
        return hvd.allreduce(torch.cat(own), op=hvd.Sum, process_set=state.process_set)

    (model, state), (again, resumed) = (sharded(0.001, compression=shards) for _ in range(2))
    train(model, range(3))
    before = kept(state)
    assert bool(before.any())
    model.zero_grad()
    loss(model, 3).backward()
    sent = [p.grad.to_local().reshape(-1) for _, p in sorted(model.named_parameters())]
    mean = [
        p.grad.to_local().reshape(-1)
        for _, p in sorted(_with_mean_gradients(model, 3).named_parameters())
    ]
    left, given = torch.cat(sent) + kept(state), before + torch.cat(mean)
    torch.testing.assert_close(left, given, rtol=1e-12, atol=1e-12)

    for parameter, trained in zip(again.parameters(), model.parameters(), strict=True):
        parameter.detach().to_local().copy_(trained.detach().to_local())
    resumed.load_state_dict(state.state_dict())
    for each in (model, again):
        train(each, range(4, 8))
    assert torch.equal(weights(again), weights(model))
    whole = weights(model)
    assert all(torch.equal(whole, other) for other in hvd.allgather(whole[None]))


def _with_mean_gradients(model: torch.nn.Module, step: int) -> torch.nn.Module:
    """Return another model with these weights and the mean gradient of all ranks' batches."""
    other, _ = sharded(1.0)
    for parameter, trained in zip(other.parameters(), model.parameters(), strict=True):
        parameter.detach().to_local().copy_(trained.detach().to_local())
    loss(other, step).backward()
    return other


def test_clipping_corrected_gradients_is_refused() -> None:
    for options in ({"adam_correction": BETAS}, {"momentum_correction": 0.9}):
        model, way = (
            sharded(0.5, **options)[0],
            "AdamW" if "adam_correction" in options else "momentum",
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for clips in (False, True):
            optimizer.zero_grad()
            loss(model, 0).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                raises(ValueError, optimizer.step, *options, "clip_grad_norm_", way)
            else:
                optimizer.step()


def test_residuals_saved_by_module_in_the_old_format_are_loaded() -> None:
    """Earlier versions of gtopk saved it that way."""
    (model, state), (_, resumed) = sharded(0.05, momentum_correction=0.9), sharded(0.05)
    train(model, range(2))
    saved, shard = state.state_dict(), RANK % 2
    (held,) = saved["held"].values()
    by_module = {}
    for layer in (f"{shard}/0", f"{shard}/1", f"{shard}/2"):
        parts = [held[f"{layer}.weight"], held[f"{layer}.bias"]]
        by_module[layer] = {what: torch.cat([part[what] for part in parts]) for what in parts[0]}
    resumed.load_state_dict({**saved, "held": {RANK: by_module}})
    (loaded,) = resumed.state_dict()["held"].values()
    assert held.keys() == loaded.keys()
    for name, tensors in held.items():
        assert all(torch.equal(loaded[name][what], tensor) for what, tensor in tensors.items())


def test_torch_checkpoint_keeps_each_ranks_own_residuals() -> None:
    model, state = sharded(0.05)
    train(model, range(2))
    held = residuals(state)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    dcp.save({"replicas": state.state_dict()}, storage_writer=Writer(folder))
    train(model, range(2, 4))
    loaded = {"replicas": state.state_dict()}
    dcp.load(loaded, storage_reader=Reader(folder))
    state.load_state_dict(loaded["replicas"])
    assert state.progress.steps == 2
    assert all(map(torch.equal, residuals(state).values(), held.values()))
    assert any(residual.any() for residual in held.values())


def test_replicas_that_start_from_different_weights_are_warned_of() -> None:
    model, _ = sharded(0.05)
    with torch.no_grad():
        model[1].bias.to_local().add_(RANK // 2)
    messages = logged(lambda: train(model, range(3)))
    (text,) = (each for each in messages if "replicas are not the same" in each)
    assert f"rank {RANK}: " in text
    assert "parameter '1.bias'" in text


def test_new_replica_state_loads_residuals_from_torch_checkpoints() -> None:
    model, state = sharded(0.05)
    train(model, range(2))
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    dcp.save({"replicas": state.state_dict()}, storage_writer=Writer(folder))
    ways = [sharded(0.05)[1] for _ in range(3)]
    ways[0].load_state_dict(gtopk.load_latest(folder, None).values["replicas"])
    gtopk.load_latest(folder, None, replicas=ways[1])
    loaded = {"replicas": ways[2].state_dict()}
    dcp.load(loaded, storage_reader=Reader(folder))
    assert logged(lambda: ways[2].load_state_dict(loaded["replicas"])) == []
    for each in ways:
        assert each.progress.steps == 2
        assert all(map(torch.equal, residuals(each).values(), residuals(state).values()))


def test_replica_state_not_loaded_with_sgd_is_reported() -> None:
    """Also through DCP, which loads a state saved before the run's first step."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    model, state = sharded(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()

    steps(model, optimizer)
    dcp.load(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    saved, held = copy.deepcopy(optimizer.state_dict()), state.state_dict()
    for is_kept in (False, True):
        model, state = sharded(0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.load_state_dict(saved)
        if is_kept:
            state.load_state_dict(held)
        messages = logged(lambda each=(model, optimizer): steps(*each))
        warnings = [text for text in messages if "the state of the hook was not loaded" in text]
        assert len(warnings) == (not is_kept), messages


def test_residuals_survive_compiling_and_renaming_modules() -> None:
    (model, state), compiled = sharded(0.05), torch.compile(sharded(0.05)[0], backend="eager")
    train(model, range(2))
    train(compiled, range(2))
    resumed = fsdp.replicate(compiled, MESH["replicate"], 0.05)
    train(compiled, range(2, 3))
    assert residuals(resumed).keys() == residuals(state).keys()
    saved = state.state_dict()
    shard = RANK % 2
    saved["held"][RANK][f"{shard}/gone"] = saved["held"][RANK].pop(f"{shard}/1.weight")
    resumed.load_state_dict(saved)
    assert not residuals(resumed)[f"{shard}/1.weight"].any()
    assert torch.equal(residuals(resumed)[f"{shard}/gone"], residuals(state)[f"{shard}/1.weight"])


def test_replicate_refuses_unsharded_models_and_wrong_meshes() -> None:
    with pytest.raises(ValueError, match="call fully_shard before replicate"):
        fsdp.replicate(network(), MESH["replicate"])
    model = network()
    fully_shard(model, mesh=MESH["shard"])
    for wrong in (MESH, None, "replicate", model):
        with pytest.raises(ValueError, match=r"must be a mesh of one dimension, .* got"):
            fsdp.replicate(model, wrong)  # type: ignore[arg-type]
    expected = (
        rf"of the ranks that hold the same shard.* rank {RANK} shares a replica with \[{RANK ^ 1}\]"
    )
    with pytest.raises(ValueError, match=expected):
        fsdp.replicate(model, MESH["shard"])
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got DeviceMesh"):
        fsdp.replicate(MESH["replicate"], model)
    model = network()
    whole = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=whole["shard"])
    with pytest.raises(ValueError, match=rf"rank {RANK} holds the whole model and replicas has no"):
        fsdp.replicate(model, whole["shard"])
    model = network()
    fully_shard(model[1], mesh=MESH)
    fully_shard(model, mesh=MESH["shard"])
    with pytest.raises(ValueError, match=r"module '1' is replicated by FSDP itself.* twice"):
        fsdp.replicate(model, MESH["replicate"])
    model = torch.nn.ParameterDict({"weight": torch.ones(4, dtype=torch.complex64)})
    fully_shard(model, mesh=MESH["shard"])
    with pytest.raises(ValueError, match=r"complex parameters .* 'weight', torch.complex64 \[4\]"):
        fsdp.replicate(model, MESH["replicate"])


def test_parameters_that_are_not_sharded_before_replicate_are_refused() -> None:
    expected = rf"rank {RANK}: parameter '2\.weight' was not .* fully_shard first.*ignored_params="

    def replicated_in_part() -> torch.nn.Module:
        model = network()
        for layer in model[:2]:
            fully_shard(layer, mesh=MESH["shard"])
        model[2].requires_grad_(False)
        fsdp.replicate(model, MESH["replicate"], 0.05)
        return model

    model = network()
    fully_shard(model[0], mesh=MESH["shard"])
    fully_shard(model[1], mesh=MESH["shard"])
    with pytest.raises(ValueError, match=expected):
        fsdp.replicate(model, MESH["replicate"], 0.05)
    for is_sharded_later in (False, True):
        model = replicated_in_part()
        if is_sharded_later:
            fully_shard(model, mesh=MESH["shard"])
        train(model, range(1))
        model[2].requires_grad_(True)
        with pytest.raises(ValueError, match=expected):
            train(model, range(1, 2))


def test_ignored_parameters_are_left_to_the_script() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = network()
        bias = model[1].bias
        fully_shard(model, mesh=MESH["shard"], ignored_params={bias})
        optimizers = [
            kind([p for p in model.parameters() if p is not bias], lr=0.1),
            torch.optim.SGD([bias], lr=0.1),
        ]
        options = {"optimizer": optimizers[0], "ignored_params": {bias}}
        state = fsdp.replicate(model, MESH["replicate"], 1.0, **options)

        def steps(model=model, bias=bias, optimizers=optimizers) -> None:
            for step in range(3):  # the last one does not count
                (loss(model, step) * (torch.nan if (step, RANK) == (2, 1) else 1.0)).backward()
                torch.distributed.all_reduce(bias.grad)
                bias.grad /= 4
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        assert not [text for text in logged(steps) if "outside" in text]
        assert state.progress.steps == 2
        assert bias.isfinite().all()
        if kind is torch.optim.SGD:
            expected = reference(range(2))[1].bias
            torch.testing.assert_close(bias, expected, rtol=1e-12, atol=1e-12)


def test_replicate_refuses_parameters_with_copies_on_ranks_of_a_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(network()[:2], mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"parameter '1\.bias' has copies on 2 ranks of a replica"):
        fsdp.replicate(model, mesh["replicate"])


def test_pickling_a_replica_state_is_refused_naming_state_dict() -> None:
    _, state = sharded(0.05)
    expected = r"a ReplicaState can be neither copied nor pickled.* state\.state_dict\(\)"
    for call in (copy.copy, copy.deepcopy, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(TypeError, match=expected):
            call(state)
