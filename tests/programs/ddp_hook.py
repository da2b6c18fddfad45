"""For ranks of ddp_checks.py: gTop-k as a communication hook of PyTorch's DDP."""

import inspect
import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.config  # before any optimizer: models are compiled here
from checks import BETAS, logged, raises, same_everywhere, train_beside_adamw, weights
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gtopk
import gtopk.torch as hvd
from gtopk.ddp import GTopKState, gtopk_hook
from gtopk.errors import HorovodInternalError
from gtopk.runtime.world import world

torch.distributed.init_process_group("gloo")
RANK, SIZE = torch.distributed.get_rank(), torch.distributed.get_world_size()
# So small that DDP makes a bucket for each parameter after the first step.
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}


class Net(torch.nn.Module):
    """Some layers; one may be left out."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12, dtype=dtype) for _ in range(4))
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)
        self.used = range(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.used:
            x = torch.tanh(self.layers[number](x))
        return x


def batch(step: int, rank: int = RANK, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        8, 12, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype
    )


class Recorder:
    """Sums the gradients that DDP hands to a hook, by parameter, with the hook's weights."""

    def __init__(self, state: GTopKState, ranks: hvd.ProcessSet = hvd.global_process_set) -> None:
        self.state, self.ranks = state, ranks
        self.handed: dict[torch.Tensor, torch.Tensor] = {}
        self.buckets = 0

    def hook(
        self, state: GTopKState, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            before = self.handed.get(parameter, torch.zeros_like(parameter))
            self.handed[parameter] = before + gradient.detach() / self.ranks.size()
        self.buckets = max(self.buckets, bucket.index() + 1)
        return gtopk_hook(state, bucket)

    def assert_nothing_is_lost(self, model: Any, begun: torch.Tensor) -> None:
        """Check it for a model that only `train` has trained."""
        (held,) = self.state.state_dict(model)["held"].values()
        names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
        kept = [
            sum(held[name][what] for what in ("residual", "owner_error") if what in held[name])
            for name in names
        ]
        residuals = torch.cat([each.reshape(-1) for each in kept])
        handed = torch.cat([self.handed[p].reshape(-1) for p in model.parameters()])
        updates = (begun - weights(model)) / 0.1
        assert (updates != 0).sum() < len(updates)
        given = updates + summed(residuals, self.ranks)
        rounding = 1e-12 if begun.dtype == torch.float64 else 1e-5
        handed = summed(handed, self.ranks)
        torch.testing.assert_close(handed, given, rtol=rounding, atol=rounding)


def train(
    model: Any, steps: range, loss: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        (loss or (lambda y: y.square().mean()))(model(batch(step, dtype=dtype))).backward()
        optimizer.step()


def wrapped(state: GTopKState | None, **options: Any) -> Any:
    model = DistributedDataParallel(**{"module": Net(), **SMALL_BUCKETS, **options})
    if state is not None:
        model.register_comm_hook(state, gtopk_hook)
    return model


def summed(vector: torch.Tensor, ranks: hvd.ProcessSet = hvd.global_process_set) -> torch.Tensor:
    return hvd.allreduce(vector, op=hvd.Sum, process_set=ranks)


def assert_alike(model: Any, ranks: hvd.ProcessSet = hvd.global_process_set) -> None:
    mine = weights(model)
    everyones = hvd.allgather(mine[None], process_set=ranks)
    assert all(torch.equal(mine, other) for other in everyones)


def test_hook_at_density_1_equals_ddps_allreduce() -> None:
    for options in (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        ours, theirs = wrapped(GTopKState(1.0), **options), wrapped(None, **options)
        train(ours, range(4))
        train(theirs, range(4))
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-12, atol=1e-12)


def test_adam_correction_at_density_1_equals_adamw_for_equal_gradients() -> None:
    """Also when DDP rebuilds its buckets: moments move with their parameters."""
    model = wrapped(GTopKState(1.0, adam_correction=BETAS), **SMALL_BUCKETS)
    alone = Net()
    train_beside_adamw(model, alone, lambda each, step: each(batch(step, rank=0)).square().mean())
    torch.testing.assert_close(weights(model), weights(alone), rtol=1e-10, atol=1e-12)


def test_adam_correction_continues_when_a_layer_of_the_bucket_is_frozen() -> None:
    state = GTopKState(1.0, adam_correction=BETAS)
    model = wrapped(state, find_unused_parameters=True, bucket_cap_mb=25)
    alone = Net()

    def loss(each: Any, step: int) -> torch.Tensor:
        net = getattr(each, "module", each)
        net.layers[2].requires_grad_(step not in (2, 3))
        return each(batch(step, rank=0)).square().mean()

    train_beside_adamw(model, alone, loss)
    torch.testing.assert_close(weights(model), weights(alone), rtol=1e-10, atol=1e-12)


def test_gradient_is_conserved_when_ddp_rebuilds_its_buckets() -> None:
    for options in ({}, {"static_graph": True}):
        state = GTopKState(0.05)
        model = DistributedDataParallel(Net(), **SMALL_BUCKETS, **options)
        record = Recorder(state)
        model.register_comm_hook(state, record.hook)
        begun = weights(model)
        train(model, range(5))
        assert record.buckets > 1
        assert_alike(model)
        record.assert_nothing_is_lost(model, begun)


def test_gradient_is_conserved_under_autocast() -> None:
    state = GTopKState(0.05)
    model = DistributedDataParallel(Net(torch.float32), **SMALL_BUCKETS)
    record = Recorder(state)
    model.register_comm_hook(state, record.hook)
    begun = weights(model)
    computed_in = set()

    def loss(y: torch.Tensor) -> torch.Tensor:
        computed_in.add(y.dtype)
        return y.float().square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(model, range(5), loss)
    assert computed_in == {torch.bfloat16}
    assert_alike(model)
    record.assert_nothing_is_lost(model, begun)


def test_overflow_beyond_float16_stays_in_the_residual() -> None:
    state = GTopKState(0.25)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).half())
    model.register_comm_hook(state, gtopk_hook)
    gradient = torch.tensor([[60032.0, 56032.0, 52032.0, 48032.0]], dtype=torch.float16)
    updates = torch.zeros(1, 4, dtype=torch.float64)
    for _ in range(8):
        model.zero_grad()
        model(gradient).sum().backward()
        updates += model.module.weight.grad
    assert state.skipped_steps == 0
    residual = state.state_dict(model)["held"][RANK]["weight"]["residual"]
    given = updates + summed(residual.double())
    torch.testing.assert_close(given, 8 * gradient.double(), rtol=1e-3, atol=0.0)


def test_bucket_of_empty_parameters_only_trains_as_with_plain_ddp() -> None:
    weight_sets = []
    for hooked in (True, False):
        net = Net()
        for number, dtype in enumerate((torch.float16, torch.float32)):  # a bucket for each
            net.register_parameter(f"empty{number}", torch.nn.Parameter(torch.ones(0, 3).to(dtype)))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if hooked:
            state = GTopKState(1.0, optimizer=optimizer, adam_steps="after")
            model.register_comm_hook(state, gtopk_hook)
        for step in range(3):
            optimizer.zero_grad()
            (model(batch(step)).square().mean() + net.empty0.sum() + net.empty1.sum()).backward()
            optimizer.step()
        weight_sets.append(weights(net.layers))
    torch.testing.assert_close(*weight_sets, rtol=1e-10, atol=1e-12)
    assert state.last_step is not None
    assert state.last_step.buckets == 3


def test_passes_under_no_sync_accumulate() -> None:
    ours, theirs = wrapped(GTopKState(1.0)), wrapped(None)
    for model in (ours, theirs):
        with model.no_sync():
            model(batch(0)).square().mean().backward()
        model(batch(1)).square().mean().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_replicas_stay_equal_when_a_layer_is_unused_in_some_steps() -> None:
    state = GTopKState(0.05)
    model = wrapped(state, find_unused_parameters=True)
    train(model, range(2))
    model.module.used = [0, 1, 3]
    train(model, range(2, 5))
    assert_alike(model)
    model.module.used = range(4)
    train(model, range(5, 7))
    assert_alike(model)
    assert state.progress.steps == 7


def test_gradient_is_conserved_for_a_layer_no_rank_uses() -> None:
    """DDP does not touch its gradients, whether None, zeros or not cleared."""
    clear: dict[str, Callable[[torch.optim.Optimizer], None]] = {
        "none": lambda optimizer: optimizer.zero_grad(),
        "zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
        "stale": lambda optimizer: None,
    }
    for way, view in itertools.product(clear, (False, True)):
        state = GTopKState(0.05)
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        model = DistributedDataParallel(Net(), **SMALL_BUCKETS, **options)
        record = Recorder(state)
        model.register_comm_hook(state, record.hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        begun = weights(model)
        for step in range(8):
            model.module.used = range(4) if step % 2 == 0 else [0, 1, 3]
            clear[way](optimizer)
            model(batch(step)).square().mean().backward()
            optimizer.step()
        record.assert_nothing_is_lost(model, begun)
        assert_alike(model)


def test_never_used_layer_gets_no_gradient() -> None:
    model = wrapped(GTopKState(0.05), find_unused_parameters=True)
    model.module.used = [0, 1, 3]
    train(model, range(3))
    assert [p.grad for p in model.module.layers[2].parameters()] == [None, None]


def test_frozen_layer_stays_unchanged_and_keeps_its_residual() -> None:
    state = GTopKState(0.05)
    model = DistributedDataParallel(Net(), **SMALL_BUCKETS, find_unused_parameters=True)
    record = Recorder(state)
    model.register_comm_hook(state, record.hook)
    begun = weights(model)
    layer = model.module.layers[2]

    def held() -> torch.Tensor:
        return state.state_dict(model)["held"][RANK]["layers.2.weight"]["residual"]

    train(model, range(3))
    held_before, weight = held(), layer.weight.detach().clone()
    assert held_before.any()
    layer.requires_grad_(False)
    train(model, range(3, 6))
    assert torch.equal(layer.weight, weight)
    assert layer.weight.grad is None
    assert torch.equal(held(), held_before)
    layer.requires_grad_(True)
    train(model, range(6, 8))
    assert not torch.equal(layer.weight, weight)
    record.assert_nothing_is_lost(model, begun)
    assert_alike(model)


def warnings_of_steps(call: Callable[[], object]) -> list[str]:
    return [text for text in logged(call) if "SGD steps " in text]


def test_parameters_that_ddp_does_not_reduce_are_an_error_by_name() -> None:
    def thawed() -> tuple[Any, torch.optim.Optimizer]:
        net = Net()
        net.layers[2].requires_grad_(False)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def added() -> tuple[Any, torch.optim.Optimizer]:
        net = Net()
        net.layers[2] = torch.nn.Identity()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    for make in (thawed, added):
        net, optimizer = make()
        model = DistributedDataParallel(net, **SMALL_BUCKETS)
        model.register_comm_hook(GTopKState(0.05), gtopk_hook)

        def step(number: int, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            optimizer.step()

        assert warnings_of_steps(lambda step=step: step(0)) == []
        if make is thawed:
            net.layers[2].requires_grad_(True)
        else:
            net.layers[2] = torch.nn.Linear(12, 12, dtype=torch.float64)
            optimizer.add_param_group({"params": net.layers[2].parameters()})
        before = weights(model)
        raises(
            ValueError, lambda step=step: step(1), f"rank {RANK}: ", "'layers.2.", "Wrap the model"
        )
        assert torch.equal(weights(model), before)
        # As the error says.
        model = DistributedDataParallel(net, **SMALL_BUCKETS)
        model.register_comm_hook(GTopKState(0.05), gtopk_hook)
        train(model, range(2, 4))
        assert_alike(model)


def test_parameter_that_ddp_was_told_to_ignore_is_the_scripts() -> None:
    net = Net()
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(net, ["layers.2.weight"])
    model = DistributedDataParallel(net, **SMALL_BUCKETS)
    model.register_comm_hook(GTopKState(0.05), gtopk_hook)
    assert warnings_of_steps(lambda: train(model, range(1))) == []


def test_gradients_that_the_hook_did_not_get_are_warned_of_once() -> None:
    model, own = wrapped(GTopKState(0.05)), torch.nn.Parameter(torch.ones(12, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), own], lr=0.1)

    def steps(forward: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            (forward(batch(step)) * own).square().mean().backward()
            optimizer.step()

    (text,) = warnings_of_steps(lambda: steps(model))
    assert f"rank {RANK}: SGD steps 1 parameter outside the hook's model, the first of" in text
    own.requires_grad_(False)
    assert warnings_of_steps(lambda: steps(model)) == []
    (text,) = warnings_of_steps(lambda: steps(model.module))
    assert f"rank {RANK}: SGD steps with this rank's own gradients" in text
    model = wrapped(GTopKState(0.05))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.ones(())
    (text,) = warnings_of_steps(lambda: steps(model.module))
    assert f"rank {RANK}: SGD steps with this rank's own gradients" in text
    # Two optimizers may share a pass.
    model = wrapped(GTopKState(0.05))
    parts = [[*model.parameters()][part::2] for part in range(2)]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]

    def step_both() -> None:
        for step in range(3):
            model(batch(step)).square().mean().backward()
            for each in optimizers:
                each.step()

    assert warnings_of_steps(step_both) == []


def test_gradients_that_another_ddp_exchanges_are_not_warned_of() -> None:
    for hook in (None, fp16_compress_hook):
        model, other = wrapped(GTopKState(0.05)), wrapped(None)
        if hook is not None:
            other.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)

        def train_both(
            turns: str, model: Any = model, other: Any = other, optimizer: Any = optimizer
        ) -> None:
            for step, turn in enumerate(turns):
                optimizer.zero_grad()
                used = {"m": [model], "o": [other], "b": [model, other]}[turn]
                sum(each(batch(step)).square().mean() for each in used).backward()
                optimizer.step()

        assert warnings_of_steps(partial(train_both, "bo")) == []
        # A search takes a tenth of a second: too long for every step.
        with patch("gc.get_referrers") as search:
            assert warnings_of_steps(partial(train_both, "bomob")) == []
        search.assert_not_called()
        again = wrapped(None, module=model.module)
        if hook is not None:
            again.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        train_both("m", again, other, optimizer)
        assert warnings_of_steps(partial(train_both, "m", again, other, optimizer)) == []
        with patch("gc.get_referrers") as search:
            train_both("mmm", again, other, optimizer)
        search.assert_not_called()


def test_discarded_gradient_kept_from_the_hook_moves_no_weight_later() -> None:
    """For example a discriminator's gradient from the generator's loss."""
    for frozen in (False, True):
        model = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
        model.register_comm_hook(GTopKState(0.25), gtopk_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(RANK)).requires_grad_()
        for _ in range(2):
            model.requires_grad_(not frozen)
            with nullcontext() if frozen else model.no_sync():
                model(x).square().sum().backward()
            model.requires_grad_(True)
            optimizer.zero_grad()
            before = weights(model)
            model(torch.zeros(8, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(weights(model), before)
        assert x.grad is not None
        assert x.grad.any()


def test_ranks_that_run_out_of_batches_join() -> None:
    model = wrapped(GTopKState(0.05), find_unused_parameters=True)
    with model.join():
        train(model, range(2 + RANK))
    assert_alike(model)


def test_nonfinite_gradient_skips_one_step_and_keeps_the_residual() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    train(model, range(3))
    held, begun = state.state_dict(model), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    # Only in the first layer, which comes last: other buckets are already exchanged.
    factor = torch.inf if RANK == SIZE - 1 else 1.0
    loss = model(batch(9)).square().mean() + factor * model.module.layers[0].bias.sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), begun)
    assert (state.skipped_steps, state.progress.steps) == (1, 3)
    after = state.state_dict(model)
    for name, tensors in held["held"][RANK].items():
        assert torch.equal(after["held"][RANK][name]["residual"], tensors["residual"]), name
    train(model, range(3, 5))
    assert_alike(model)
    assert bool(weights(model).isfinite().all())


def test_exceeding_max_skipped_steps_is_an_error_on_every_rank() -> None:
    state = GTopKState(0.05, max_skipped_steps=2)
    model, begun = wrapped(state), world.current().step

    def backward(factor: float) -> None:
        model.zero_grad()
        ((factor if RANK == SIZE - 1 else 1.0) * model(batch(0)).square().mean()).backward()

    for factor in (torch.nan, torch.inf, 1.0, torch.nan, torch.nan):
        backward(factor)
    why = rf"a gradient is not finite on rank {SIZE - 1} \(of DDP's buckets: 0"
    with pytest.raises(
        FloatingPointError, match=rf"3 steps in a row.* at step {begun + 5}, .*{why}"
    ):
        backward(torch.nan)
    assert (state.skipped_steps, state.progress.steps) == (5, 1)
    state.load_state_dict(state.state_dict(model), model)
    for _ in range(2):
        backward(torch.nan)  # skips before a load do not count as consecutive with later ones
    assert state.skipped_steps == 7
    train(model, range(2))
    assert_alike(model)


def test_overflowing_sum_skips_the_step_in_every_bucket() -> None:
    state = GTopKState(0.25)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 1, bias=False) for _ in range(3))
    scales = torch.ones(3)
    layers.forward = lambda x: sum(  # type: ignore[method-assign]
        layer(scale * x).sum() for layer, scale in zip(layers, scales, strict=True)
    )
    model = DistributedDataParallel(layers, **{**SMALL_BUCKETS, "find_unused_parameters": True})
    model.register_comm_hook(state, gtopk_hook)
    x = torch.tensor([[1.0, 0.9, 0.8, 0.7]])

    def held() -> list[torch.Tensor]:
        mine = state.state_dict(model)["held"][RANK]
        return [mine[f"{number}.weight"]["residual"] for number in range(3)]

    scales[1] = 3e38  # in the middle: one of the other buckets is already exchanged, one is not
    model(x).backward()
    before = held()
    model.zero_grad()
    model(x).backward()
    assert state.skipped_steps == 1
    assert all(map(torch.equal, held(), before))
    scales[1] = 1.0
    model.zero_grad()
    model(x).backward()
    assert (state.skipped_steps, state.progress.steps) == (1, 2)
    assert not any(map(torch.equal, held(), before))


def test_optimizer_without_scaler_skips_a_nonfinite_step() -> None:
    for closure_is in ("not there", "an argument", "named"):
        state = GTopKState(0.05)
        model = wrapped(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = []

        def compute(
            step: int, model: Any = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            factor = torch.nan if (RANK, step) == (SIZE - 1, 2) else 1.0
            loss = factor * model(batch(step)).square().mean()
            loss.backward()
            return loss

        for step in range(4):
            before.append(weights(model))
            if closure_is == "not there":
                compute(step)
                optimizer.step()
            elif closure_is == "named":
                optimizer.step(closure=partial(compute, step))
            else:
                assert optimizer.step(partial(compute, step)).ndim == 0
        assert state.skipped_steps == 1
        assert torch.equal(before[3], before[2])
        assert not torch.equal(weights(model), before[3])
        assert_alike(model)


def test_nonfinite_step_is_skipped_by_all_optimizers_of_the_model() -> None:
    for has_scaler in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=has_scaler)
        state = GTopKState(0.25, scaler=scaler)
        model = wrapped(state)
        first, *others = model.module.layers
        optimizers = [
            torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(torch.nn.ModuleList(others).parameters(), lr=0.1),
        ]
        # Only in one layer, in the last bucket: a scaler sees no other NaN.
        bad = [False]
        first.bias.register_hook(lambda g, bad=bad: g * torch.nan if bad[0] else g)
        before = []
        for step in range(4):
            before.append(weights(model))
            bad[0] = (RANK, step) == (SIZE - 1, 2)
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert state.skipped_steps == 1
        assert torch.equal(before[3], before[2])
        assert not torch.equal(weights(model), before[3])
        assert bool(weights(model).isfinite().all())
        assert_alike(model)


def test_skipped_pass_of_one_model_keeps_the_step_of_another() -> None:
    states = [GTopKState(0.05), GTopKState(0.05)]
    first, second = (wrapped(None) for _ in range(2))
    record = Recorder(states[1])
    first.register_comm_hook(states[0], gtopk_hook)
    second.register_comm_hook(states[1], record.hook)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    begun = weights(second)
    for step in range(4):
        before = weights(first)
        factor = torch.nan if (RANK, step) == (SIZE - 1, 2) else 1.0
        optimizer.zero_grad()
        (factor * first(batch(step)).square().mean()).backward()
        second(batch(step)).square().mean().backward()
        optimizer.step()
        assert torch.equal(before, weights(first)) == (step == 2)
    assert [state.skipped_steps for state in states] == [1, 0]
    record.assert_nothing_is_lost(second, begun)
    assert_alike(first)
    assert_alike(second)


def test_optimizer_applies_every_gradient_except_the_skipped_one() -> None:
    state = GTopKState(1.0)
    model = wrapped(state)
    (torch.nan * model(batch(0)).square().mean()).backward()
    first, late = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    begun = weights(model)
    first.step()
    assert torch.equal(weights(model), begun)
    with model.no_sync():
        model(batch(1)).square().mean().backward()  # a pass that the state does not see
    first.step()
    assert not torch.equal(weights(model), begun)
    first.zero_grad()
    begun = weights(model)
    model(batch(2)).square().mean().backward()
    late.step()
    assert not torch.equal(weights(model), begun)


def test_changing_loss_scale_does_not_change_the_residual() -> None:
    models = []
    for scales in ((1.0, 1.0, 1.0), (2.0**10, 2.0**3, 2.0**7)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        model = wrapped(GTopKState(0.05, scaler=scaler))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, scale in enumerate(scales):
            scaler.scale(torch.ones(()))  # which makes it ready
            scaler.update(scale)
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            scaler.step(optimizer)
        models.append(weights(model))
    torch.testing.assert_close(*models, rtol=1e-12, atol=1e-12)


def test_ranks_with_different_options_get_an_error() -> None:
    model = wrapped(GTopKState(0.5 if RANK else 0.25))
    with pytest.raises(RuntimeError, match=r"(?s)density=0.25.*density=0.5"):
        train(model, range(1))


def test_gtopk_state_of_two_models_is_refused() -> None:
    state = GTopKState(0.5)
    first, second = wrapped(state), wrapped(state)
    with pytest.raises(ValueError, match="use one GTopKState for each model"):
        second(first(batch(0))).square().mean().backward()  # one pass of both
    state = GTopKState(0.5)
    first, second = wrapped(state), wrapped(state)
    train(first, range(2))
    with pytest.raises(ValueError, match="use one GTopKState for each model"):
        train(second, range(1))
    train(first, range(2, 4))
    assert state.progress.steps == 4


def test_ddp_that_leaves_out_buckets_is_refused() -> None:
    """The pass would never end, and the next one would undo what it took from the residual."""
    option = "skip_all_reduce_unused_params"
    if option not in inspect.signature(DistributedDataParallel).parameters:
        return  # an older torch
    for unused in (0, 3):
        model = wrapped(GTopKState(0.5), find_unused_parameters=True, **{option: True})
        model.module.used = [layer for layer in range(4) if layer != unused]
        with pytest.raises(ValueError, match=f"{option}=True"):
            train(model, range(2))


class Complex(torch.nn.Module):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self) -> torch.Tensor:
        return self.weight.abs().square().sum()


def test_complex_and_sparse_gradients_are_refused() -> None:
    model: Any = DistributedDataParallel(Complex())
    model.register_comm_hook(GTopKState(0.5), gtopk_hook)
    expected = r"complex parameters cannot be exchanged; .*complex64 \[4\].*view_as_real"
    with pytest.raises(ValueError, match=expected):
        model().backward()

    model = DistributedDataParallel(torch.nn.EmbeddingBag(6, 2, sparse=True))
    model.register_comm_hook(GTopKState(0.5), gtopk_hook)
    expected = r"the parameter of shape \[6, 2\] has sparse gradients.* sparse=False"
    with pytest.raises(ValueError, match=expected):
        model(torch.tensor([[1, RANK]])).sum().backward()


def test_ranks_that_disagree_get_one_error_and_may_continue() -> None:
    if SIZE == 1:
        return
    other = wrapped(GTopKState(0.05 if RANK else 0.1))
    text = raises(HorovodInternalError, lambda: train(other, range(1)), "the ranks disagree about")
    assert "density=0.1" in text
    assert same_everywhere(text)
    model = wrapped(GTopKState(0.05))
    train(model, range(2))
    assert_alike(model)


def test_momentum_or_adam_after_a_correction_is_refused_in_the_first_step() -> None:
    for options, kind, parts in (
        ({"momentum_correction": 0.9}, torch.optim.SGD, ["momentum_correction=0.9", "not 0.9"]),
        ({"adam_correction": BETAS}, torch.optim.AdamW, ["AdamW would compute them again"]),
    ):
        model = wrapped(GTopKState(0.5, **options))
        own = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.1, **own)
        model(batch(0)).square().mean().backward()
        before = weights(model)
        raises(ValueError, optimizer.step, *parts)
        assert torch.equal(weights(model), before)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        strangers = torch.nn.Linear(2, 2)  # has no hook, so is not checked
        kind(strangers.parameters(), lr=0.1, **own).step()


def test_clipping_corrected_gradients_is_refused() -> None:
    for options in ({"adam_correction": BETAS}, {"momentum_correction": 0.9}):
        model, way = (
            wrapped(GTopKState(0.5, **options)),
            "AdamW" if "adam_correction" in options else "momentum",
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for clips in (False, True):
            optimizer.zero_grad()
            model(batch(0)).square().mean().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                raises(ValueError, optimizer.step, *options, "clip_grad_norm_", way)
            else:
                optimizer.step()


def test_rank_0_advises_against_adamw_after_compression() -> None:
    model = wrapped(GTopKState(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def steps() -> None:
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()

    messages = [text for text in logged(steps) if "AdamW after compression" in text]
    assert len(messages) == (RANK == 0)


def test_density_that_leaves_few_entries_is_reported_once() -> None:
    model = DistributedDataParallel(torch.nn.Linear(40, 40))
    model.register_comm_hook(GTopKState(0.05), gtopk_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(3):
            model(torch.ones(2, 40)).square().mean().backward()
            optimizer.step()

    messages = [text for text in logged(steps) if "accuracy suffers" in text]
    expected = (
        "density=0.05 leaves 82 of 1,640 entries a step; under about 500 accuracy suffers: "
        "use density=0.31 or more"
    )
    assert messages == ([expected] if RANK == 0 else [])


def diverge(model: Any) -> None:
    """Change a parameter on the last rank only, like a script that forgets the other ranks."""
    if RANK == SIZE - 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1.0


def test_diverged_replicas_are_warned_of_or_an_error_by_check_every() -> None:
    ways = (({}, 1, 0), ({"check_every": 0}, 0, 0), ({"check_every": 1}, 0, 1))
    for options, warns, fails in ways:
        state = GTopKState(0.05, **options)
        model = wrapped(state)
        messages = logged(lambda model=model: train(model, range(2)))
        assert not any("replicas" in text for text in messages)  # and no error was raised
        state = GTopKState(0.05, **options)
        model = wrapped(state)
        train(model, range(1))
        diverge(model)
        raised = []
        try:
            messages = logged(lambda model=model: train(model, range(1, 4)))
        except HorovodInternalError as error:
            raised = [str(error)]
        warnings = [text for text in messages if "the replicas are not the same" in text]
        assert (len(warnings), len(raised)) == ((warns, fails) if SIZE > 1 else (0, 0))
        assert state.divergences == len(warnings)
        for text in warnings + raised:
            assert "in DDP's buckets, of shape [12, 12]' has the checksums" in text
            assert f"rank {SIZE - 1}: " in text
    with pytest.raises(ValueError, match="one of error, warn; got 'heal'"):
        GTopKState(0.05, check_every=5, on_divergence="heal")


def test_preempted_rank_tells_the_others_in_its_next_step() -> None:
    state = GTopKState(0.05)
    model, here = wrapped(state), world.current()
    preempted = gtopk.termination()
    seen = []
    for step in range(8):
        here.termination_requested = RANK == SIZE - 1 and step >= 3
        train(model, range(step, step + 1))
        seen.append(preempted.ranks)
    assert seen == [[]] * 3 + [[SIZE - 1]] * 5
    assert state.straggler_scores is not None  # since the sixth step
    assert max(state.straggler_scores) == 1
    here.termination_requested, here.preempted = False, []


def test_compiled_model_with_hook_trains_like_plain_ddp() -> None:
    model = wrapped(GTopKState(1.0), bucket_cap_mb=1)  # the compiler only compiles larger ones
    compiled = torch.compile(model, backend="aot_eager")
    plain = wrapped(None)
    for each, of in ((compiled, model), (plain, plain)):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            each(batch(step)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-9, atol=1e-9)


def test_gradient_is_conserved_for_a_compiled_model() -> None:
    state = GTopKState(0.05)
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    record = Recorder(state)
    model.register_comm_hook(state, record.hook)
    begun = weights(model)
    train(torch.compile(model, backend="aot_eager"), range(5))
    assert_alike(model)
    record.assert_nothing_is_lost(model, begun)


def test_hook_exchanges_within_a_process_group() -> None:
    if SIZE < 3:
        return
    some = hvd.ProcessSet([0, SIZE - 1])
    hvd.shutdown()
    hvd.init(process_sets=[some])
    group, unknown = map(torch.distributed.new_group, (some.ranks, [0, 1]))
    if RANK <= 1:
        with pytest.raises(ValueError, match=r"ranks \[0, 1\] is no process set of gtopk"):
            GTopKState(0.05, unknown)
    else:
        with pytest.raises(TypeError, match=f"rank {RANK}: process_group must be a ProcessGroup"):
            GTopKState(0.05, unknown)
    if some.included():
        dense = GTopKState(1.0, group)
        ours, theirs = (wrapped(state, process_group=group) for state in (dense, None))
        train(ours, range(4))
        train(theirs, range(4))
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-12, atol=1e-12)
        mixed = wrapped(GTopKState(0.05), process_group=group)
        expected = re.escape(f"over ranks {some.ranks}, and the state of its hook over ranks [0, ")
        with pytest.raises(ValueError, match=rf"rank {RANK}: .* {expected}"):
            mixed(batch(0)).square().mean().backward()
        state = GTopKState(0.05, group)
        model = DistributedDataParallel(Net(), **SMALL_BUCKETS, process_group=group)
        record = Recorder(state, some)
        model.register_comm_hook(state, record.hook)
        begun = weights(model)
        train(model, range(5))
        assert_alike(model, some)
        record.assert_nothing_is_lost(model, begun)
        mixed = wrapped(GTopKState(0.05, group))  # of all ranks
        with pytest.raises(
            ValueError, match=r"model over ranks \[0, 1, 2.*GTopKState\(process_group"
        ):
            mixed(batch(0)).square().mean().backward()
    else:
        wrapped(None)
        # All ranks must have created as many states of all ranks, as states are numbered.
        GTopKState(0.05)
    everyone = wrapped(GTopKState(0.05))
    train(everyone, range(2))
    assert_alike(everyone)
    hvd.shutdown()  # other tests expect a world without such a set


def test_hook_learns_as_close_to_dense_as_powersgd() -> None:
    """On the same task, after as many steps, both come close to dense."""
    target = torch.randn(12, 12, generator=torch.Generator().manual_seed(5))

    def final_loss(hook: Callable[[Any], None]) -> float:
        model = DistributedDataParallel(torch.nn.Linear(12, 12, bias=False))
        torch.nn.init.zeros_(model.module.weight)
        hook(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(60):
            x = batch(step, dtype=torch.float32)
            loss = (model(x) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float((model.module.weight.detach() - target.T).square().mean())

    dense = final_loss(lambda model: None)
    ours = final_loss(lambda m: m.register_comm_hook(GTopKState(0.1), gtopk_hook))
    power = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    theirs = final_loss(lambda m: m.register_comm_hook(power, powerSGD_hook.powerSGD_hook))
    begun = float(target.square().mean())
    assert dense < 0.01 * begun, dense
    assert ours < 0.05 * begun, ours
    assert theirs < 0.5 * begun, theirs
