"""Run under torchrun on 2 ranks or more: AdamW whose steps DDP's hook makes."""

import copy
import gc
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config  # before any optimizer: models are compiled here
from checks import adamw, equal, logged, raises, run_tests, weights
from ddp_hook import RANK, SIZE, SMALL_BUCKETS, Net, assert_alike, batch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import gtopk.torch as hvd
from gtopk.compression import Compression
from gtopk.ddp import GTopKState, gtopk_hook
from gtopk.exchange.sampling import SWEEP
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.wrapped.adam_step import ramp

# One bucket, of the parameters in the model's order.
IN_ORDER = {"bucket_cap_mb": 25, "find_unused_parameters": True}
OPTIONS = {"wire": "packed", "values": "int8"}


def hooked(
    density: float = 0.1,
    buckets: dict[str, Any] = IN_ORDER,
    kind: Any = torch.optim.AdamW,
    **options: Any,
) -> tuple[Any, Any, GTopKState]:
    """Return a model, its optimizer, and the state of its hook."""
    model = DistributedDataParallel(Net(), **buckets)
    optimizer = adamw(model, kind)
    state = GTopKState(density, optimizer=optimizer, **options)
    model.register_comm_hook(state, gtopk_hook)
    return model, optimizer, state


def distributed(density: float = 0.1, compression: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return a model, and its DistributedOptimizer with the same bucket."""
    model = Net()
    own = {name: options.pop(name) for name in ("wire", "values") if name in options}
    optimizer = DistributedOptimizer(
        adamw(model),
        model.named_parameters(),
        compression or Compression.gtopk(density, **own),
        groups=[list(model.parameters())],
        **options,
    )
    return model, optimizer


def loss(model: Any, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def train(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def saved(model: Any, optimizer: Any, state: GTopKState) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": state.state_dict(model),
        }
    )


def test_compiled_model_trains_like_an_uncompiled_one() -> None:
    found = []
    for compiles in (False, True):
        model, optimizer, _ = hooked(buckets=IN_ORDER)
        each = torch.compile(model, backend="aot_eager") if compiles else model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*global hooks on modules")  # torch's, once
            train(each, optimizer, range(4))
        found.append(weights(model))
        assert_alike(model)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_ddp_adamw_hook_is_bit_identical_to_distributed_optimizer() -> None:
    """Also with a learning-rate schedule, and with passes that accumulate."""
    for options, passes in (({}, 1), (OPTIONS, 2), ({"local_residual": False}, 1)):
        ours, optimizer, state = hooked(**options)
        theirs, other = distributed(**options, backward_passes_per_step=passes)
        schedules = [ramp(each, 20) for each in (optimizer, other)]
        for step in range(12):
            for each in (optimizer, other):
                each.zero_grad()
            for number in range(passes - 1):
                with ours.no_sync():
                    loss(ours, 100 + 2 * step + number).backward()
                loss(theirs, 100 + 2 * step + number).backward()
            loss(ours, step).backward()
            loss(theirs, step).backward()
            for each in (optimizer, other):
                each.step()
            assert torch.equal(weights(ours), weights(theirs)), (options, step)
            for schedule in schedules:
                schedule.step()
        assert state.makes_adam_steps
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert equal(optimizer.state[one], other.state[two])


def test_rebuilt_ddp_buckets_keep_replicas_equal_and_adam_state() -> None:
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        model, optimizer, state = hooked(buckets={**SMALL_BUCKETS, **options})
        train(model, optimizer, range(6))
        assert_alike(model)
        held = state.state_dict(model)["held"][RANK]
        for parameter in model.parameters():
            assert float(optimizer.state[parameter]["step"]) == 6
        for parts in held.values():
            assert int(parts["age"]) == 6
            assert len(parts["row_squares"]) == 12 or parts["residual"].dim() == 1
            assert bool(parts["row_squares"].any())
        shared = torch.cat(
            [optimizer.state[p]["shared_exp_avg_sq"].reshape(-1) for p in model.parameters()]
        )
        assert all(torch.equal(shared, other) for other in hvd.allgather(shared[None]))
        train(model, optimizer, range(6, 9))
        assert_alike(model)


def test_training_forward_includes_unsent_steps_and_evaluation_does_not() -> None:
    model, optimizer, state = hooked(0.02)
    seen: list[torch.Tensor] = []
    model.module.layers[0].register_forward_pre_hook(lambda *call: seen.append(weights(model)))
    train(model, optimizer, range(3))
    center = weights(model)
    held = state.state_dict(model)["held"][RANK]
    own = torch.cat(
        [held[name]["residual"].reshape(-1) for name, _ in model.module.named_parameters()]
    )
    optimizer.zero_grad()
    loss(model, 3)
    torch.testing.assert_close(seen[-1], center - SIZE * own, rtol=1e-12, atol=1e-12)
    assert not torch.equal(seen[-1], center)
    with state.evaluating():
        assert torch.equal(weights(model), center)
        loss(model, 3)
        assert torch.equal(seen[-1], center)
    loss(model, 3).backward()
    for each in (model, model.module):
        each.eval()
        each(batch(0))
        assert torch.equal(seen[-1], center)
        each.train()
        loss(model, 3)
        assert not torch.equal(seen[-1], center)
        values = each.state_dict().values()
        assert torch.equal(torch.cat([v.reshape(-1) for v in values]), center)
    optimizer.step()
    assert_alike(model)


def test_mean_gradient_is_clipped_before_the_moments() -> None:
    ours, optimizer, _ = hooked(global_clip_norm=0.05)
    theirs, other = distributed(global_clip_norm=0.05)
    free, unclipped, _ = hooked()
    for each, one in ((ours, optimizer), (theirs, other), (free, unclipped)):
        train(each, one, range(8))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(weights(ours), weights(free), rtol=1e-3)
    assert_alike(ours)


def test_reported_gradient_norm_is_of_the_mean_before_clipping() -> None:
    """Over a sweep of one gradient, samples have each coordinate once, so their mean is exact."""
    for clips in ({}, {"global_clip_norm": 0.5}):
        torch.manual_seed(0)
        x = batch(0, 0 if clips else RANK)  # each rank estimates by itself how much to clip
        whole = torch.nn.Linear(12, 12).double()
        whole(x).sum().backward()
        mean = torch.cat([hvd.allreduce(p.grad.reshape(-1)) for p in whole.parameters()])
        model = DistributedDataParallel(torch.nn.Linear(12, 12).double())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = GTopKState(0.1, optimizer=optimizer, **clips)
        model.register_comm_hook(state, gtopk_hook)
        other = DistributedOptimizer(
            torch.optim.AdamW(whole.parameters(), lr=0.01),
            whole.named_parameters(),
            Compression.gtopk(0.1),
            **clips,
        )
        for trained, stepped, reports in ((model, optimizer, state), (whole, other, other)):
            squares = []
            for _ in range(SWEEP):
                stepped.zero_grad()
                trained(x).sum().backward()
                stepped.step()
                assert reports.last_step is not None
                # None: the sample has no coordinate of so small a model.
                squares.append((reports.last_step.gradient_norm or 0.0) ** 2)
            found = torch.tensor(sum(squares) / SWEEP, dtype=torch.float64)
            # Samples are sent as bfloat16.
            torch.testing.assert_close(found, mean.square().sum(), rtol=0.01, atol=0.0)
    model, optimizer, state = hooked(adam_steps="after")
    train(model, optimizer, range(1))
    assert state.last_step is not None
    assert state.last_step.gradient_norm is None


def test_clip_grad_norm_after_backward_is_refused() -> None:
    for early in (True, False):
        model = DistributedDataParallel(Net(), **SMALL_BUCKETS)
        optimizer = adamw(model)

        def clip(*call: Any, of: Any = model) -> None:
            torch.nn.utils.clip_grad_norm_(of.parameters(), 0.1)

        if early:
            optimizer.register_step_pre_hook(clip)
        state = GTopKState(0.1, optimizer=optimizer)
        model.register_comm_hook(state, gtopk_hook)
        if not early:  # after the state's own
            optimizer.register_step_pre_hook(clip)
        loss(model, 0).backward()
        raises(ValueError, optimizer.step, "clip_grad_norm_", "global_clip_norm=")
    with pytest.raises(ValueError, match="use clip_grad_norm_ after backward"):
        GTopKState(0.1, global_clip_norm=1.0)


def test_step_without_exchanged_gradients_is_refused() -> None:
    model, optimizer, _ = hooked()
    with model.no_sync():
        loss(model, 0).backward()
    raises(ValueError, optimizer.step, "agreed steps", "no_sync()")
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    raises(ValueError, optimizer.step, "from a step() before")
    optimizer.zero_grad()
    optimizer.step()  # there is nothing
    assert_alike(model)


def test_accumulating_passes_without_no_sync_is_refused_for_adamw() -> None:
    for view in (False, True):
        model, optimizer, _ = hooked(buckets={**SMALL_BUCKETS, "gradient_as_bucket_view": view})
        for clears in (True, False):
            for step in range(3):
                optimizer.zero_grad(set_to_none=clears)
                loss(model, step).backward()
                optimizer.step()
        with model.no_sync():
            loss(model, 9).backward()  # thrown away, as in a GAN's other pass
        optimizer.zero_grad()
        loss(model, 3).backward()
        raises(RuntimeError, loss(model, 4).backward, "model.no_sync()")


def test_accumulating_passes_without_no_sync_is_refused_for_corrections() -> None:
    for correction in ({"momentum_correction": 0.9}, {"adam_correction": (0.9, 0.999)}):
        model = DistributedDataParallel(Net(), **IN_ORDER)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.register_comm_hook(GTopKState(0.5, **correction), gtopk_hook)
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        with model.no_sync():
            loss(model, 3).backward()
        loss(model, 4).backward()
        raises(RuntimeError, loss(model, 5).backward, next(iter(correction)), "model.no_sync()")


def test_discarded_exchanged_pass_is_reported_once() -> None:
    model, optimizer, _ = hooked()
    train(model, optimizer, range(2))

    def throw_away() -> None:
        for step in range(2, 5):
            optimizer.zero_grad()
            loss(model, step).backward()

    messages = [text for text in logged(throw_away) if "no step() has applied them" in text]
    assert len(messages) == 1
    assert f"rank {RANK}" in messages[0]
    optimizer.zero_grad()
    with model.no_sync():
        assert not logged(throw_away)


def test_hook_refuses_a_state_that_is_not_gtopks() -> None:
    for state in (None, GTopKState):
        model = DistributedDataParallel(Net())
        model.register_comm_hook(state, gtopk_hook)
        raises(TypeError, loss(model, 0).backward, "needs a GTopKState, got")


def test_missing_residual_of_a_loaded_optimizer_is_reported() -> None:
    model, optimizer, state = hooked()
    train(model, optimizer, range(3))
    before = saved(model, optimizer, state)
    for loads_first, loads_last in ((False, False), (True, False), (False, True)):
        resumed, again, fresh = hooked()
        resumed.module.load_state_dict(before["model"])
        if loads_first:
            fresh.load_state_dict(before["state"], resumed)
        again.load_state_dict(before["optimizer"])
        if loads_last:
            fresh.load_state_dict(before["state"], resumed)
        messages = logged(partial(train, resumed, again, range(3, 5)))
        reports = [text for text in messages if "the state of the hook was not" in text]
        assert len(reports) == (SIZE > 1 and not (loads_first or loads_last)), reports
        again.load_state_dict(before["optimizer"])  # the hook has its own residual by now
        assert not logged(partial(train, resumed, again, range(5, 6)))


def test_ddp_can_be_recreated_after_an_error_between_forward_and_step() -> None:
    """DDP then broadcasts rank 0's parameters, which must not include its unsent steps."""
    undisturbed, other, _ = hooked()
    train(undisturbed, other, range(6))
    for fails_in_backward, is_new in itertools.product((False, True), repeat=2):
        model, optimizer, state = hooked()
        train(model, optimizer, range(3))
        net = model.module
        optimizer.zero_grad()
        value = loss(model, 3)

        def fail(gradient: torch.Tensor) -> None:
            raise ArithmeticError("broken off")

        broken = net.layers[0].weight.register_hook(fail)
        if fails_in_backward:
            with pytest.raises(ArithmeticError, match="broken off"):
                value.backward()
        broken.remove()
        del model, value  # and the hooks that DDP has on parameters
        gc.collect()
        again = DistributedDataParallel(net, **IN_ORDER)
        if is_new:
            held = state.state_dict(again)
            state = GTopKState(0.1, optimizer=optimizer)
            state.load_state_dict(held, again)
        again.register_comm_hook(state, gtopk_hook)
        train(again, optimizer, range(3, 6))
        assert torch.equal(weights(again), weights(undisturbed))
        assert state.progress.steps == 6


def test_new_hook_state_reports_the_missing_residual() -> None:
    model, optimizer, _ = hooked()
    train(model, optimizer, range(3))
    net = model.module
    del model
    gc.collect()
    again = DistributedDataParallel(net, **IN_ORDER)
    again.register_comm_hook(GTopKState(0.1, optimizer=optimizer), gtopk_hook)
    messages = logged(partial(train, again, optimizer, range(3, 5)))
    reports = [text for text in messages if "the state of the hook was not loaded" in text]
    assert len(reports) == (SIZE > 1), messages


def test_step_calls_its_closure_once_and_exchanges_its_gradients() -> None:
    ours, optimizer, _ = hooked()
    theirs, other, _ = hooked()
    called = []
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            called.append(step)
            optimizer.zero_grad()
            value = loss(ours, step)
            value.backward()
            return value

        assert bool(optimizer.step(closure) > 0)
    train(theirs, other, range(4))
    assert called == [*range(4)]
    assert torch.equal(weights(ours), weights(theirs))


def test_skipped_adamw_step_changes_no_state() -> None:
    for kind, has_scaler in itertools.product((torch.optim.AdamW, FusedAdamW), (False, True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=has_scaler, growth_interval=99)
        ours, optimizer, state = hooked(buckets=SMALL_BUCKETS, kind=kind, scaler=scaler)
        for step in range(8):
            before = saved(ours, optimizer, state)
            optimizer.zero_grad()
            bad = (RANK, step) == (SIZE - 1, 4)
            value = (
                loss(ours, step) + (torch.inf if bad else 0.0) * ours.module.layers[0].bias.sum()
            )
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            alike = equal(saved(ours, optimizer, state), before)
            assert alike == (step == 4)
        assert state.skipped_steps == 1
        assert_alike(ours)


def test_loss_scale_does_not_change_adamw_steps() -> None:
    found = []
    for kind in (torch.optim.AdamW, FusedAdamW):
        for scales in (None, (1.0, 2.0**10, 2.0**3, 2.0**7)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scales is not None)
            model, optimizer, _ = hooked(kind=kind, scaler=scaler)
            for step, scale in enumerate(scales or [1.0] * 4):
                scaler.scale(torch.ones(()))  # which makes it ready
                if scales:
                    scaler.update(scale)
                optimizer.zero_grad()
                scaler.scale(loss(model, step)).backward()
                scaler.step(optimizer)
            found.append(weights(model))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-9, atol=1e-12)


def FusedAdamW(*arguments: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(*arguments, **options, fused=True)


def test_resumed_adamw_run_is_bit_identical() -> None:
    for clips in ({}, {"global_clip_norm": 0.05}):
        model, optimizer, state = hooked(**clips)
        train(model, optimizer, range(4))
        before = saved(model, optimizer, state)
        train(model, optimizer, range(4, 8))

        resumed, again, fresh = hooked(**clips)
        resumed.module.load_state_dict(before["model"])
        again.load_state_dict(before["optimizer"])
        fresh.load_state_dict(before["state"], resumed)
        train(resumed, again, range(4, 8))
        assert torch.equal(weights(resumed), weights(model))
        assert equal(saved(resumed, again, fresh), saved(model, optimizer, state))


def test_set_optimizer_state_dict_loads_into_a_fresh_optimizer() -> None:
    model, optimizer, state = hooked()
    train(model, optimizer, range(4))
    before = saved(model, optimizer, state)
    found = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, range(4, 7))
    resumed, again, fresh = hooked()
    resumed.module.load_state_dict(before["model"])
    set_optimizer_state_dict(resumed, again, found)
    fresh.load_state_dict(before["state"], resumed)
    train(resumed, again, range(4, 7))
    assert torch.equal(weights(resumed), weights(model))


def test_gathered_residuals_of_all_ranks_can_be_resumed_from() -> None:
    model, optimizer, state = hooked(buckets=SMALL_BUCKETS)
    train(model, optimizer, range(3))
    gathered = hvd.broadcast_object(state.gather_state(model))
    other, also, fresh = hooked(buckets=SMALL_BUCKETS)
    fresh.load_state_dict(gathered, other)
    mine = state.state_dict(model)
    assert equal(fresh.state_dict(other), mine)
    train(other, also, range(3))
    assert_alike(other)


def test_state_of_bfloat16_parameters_stays_float32_when_loaded() -> None:
    model = DistributedDataParallel(Net(torch.bfloat16))
    optimizer = adamw(model)
    state = GTopKState(0.1, optimizer=optimizer)
    model.register_comm_hook(state, gtopk_hook)
    model(batch(0, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(before)
    for number, parts in enumerate(optimizer.state_dict()["state"].values()):
        assert parts["shared_exp_avg_sq"].dtype == torch.float32
        assert equal(parts, before["state"][number])
    assert_alike(model)


def test_frozen_layer_keeps_its_weights_moments_and_residual() -> None:
    for buckets in (IN_ORDER, {**SMALL_BUCKETS, "find_unused_parameters": True}):
        model, optimizer, state = hooked(buckets=buckets)
        layer = model.module.layers[2]

        def of_layer(
            layer: Any = layer, optimizer: Any = optimizer, state: Any = state, model: Any = model
        ) -> Any:
            held = state.state_dict(model)["held"][RANK]["layers.2.weight"]
            return copy.deepcopy([layer.weight.detach(), optimizer.state[layer.weight], held])

        train(model, optimizer, range(3))
        before = of_layer()
        layer.requires_grad_(False)
        train(model, optimizer, range(3, 6))
        assert equal(of_layer(), before)
        layer.requires_grad_(True)
        train(model, optimizer, range(6, 8))
        assert not torch.equal(layer.weight, before[0])
        assert float(optimizer.state[layer.weight]["step"]) == 5
        assert_alike(model)


def test_layer_frozen_on_one_rank_only_is_named_in_the_error() -> None:
    model, optimizer, _ = hooked(buckets={**SMALL_BUCKETS, "find_unused_parameters": True})
    train(model, optimizer, range(2))
    model.module.layers[2].requires_grad_(RANK != 1)
    with pytest.raises(RuntimeError, match=r"0(, 2)?: 0 frozen parameters; rank 1: [12] frozen"):
        train(model, optimizer, range(2, 3))


def test_layer_can_be_thawed_or_frozen_by_rewrapping_the_model() -> None:
    """DDP only knows the layers that were trainable when it was created."""
    net = Net()
    net.layers[2].requires_grad_(False)
    optimizer = adamw(net)
    state: GTopKState | None = None
    model: Any = None
    for number, is_trained in enumerate((False, True, False)):
        net.layers[2].requires_grad_(is_trained)
        held = None if state is None else copy.deepcopy(state.state_dict(model))
        model = DistributedDataParallel(net, **SMALL_BUCKETS)
        state = GTopKState(0.1, optimizer=optimizer)
        if held is not None:
            state.load_state_dict(held, model)
            ours, theirs = (each["held"][RANK] for each in (held, state.state_dict(model)))
            assert theirs.keys() >= ours.keys()
            assert all(equal(theirs[name], parts) for name, parts in ours.items())
        model.register_comm_hook(state, gtopk_hook)
        before = net.layers[2].weight.detach().clone()
        train(model, optimizer, range(3 * number, 3 * number + 3))
        assert torch.equal(before, net.layers[2].weight) == (not is_trained)
        assert_alike(model)


def test_plain_adamw_refuses_the_hooks_state_but_starts_from_weights() -> None:
    model, optimizer, _ = hooked()
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    plain = DistributedDataParallel(Net())
    plain.register_comm_hook(GTopKState(1.0), gtopk_hook)
    other = adamw(plain)
    other.load_state_dict(saved)
    expected = "the model alone, with a new optimizer"
    raises(ValueError, lambda: train(plain, other, range(1)), expected)
    again = DistributedDataParallel(Net())
    again.module.load_state_dict(model.module.state_dict())
    train(again, adamw(again), range(3, 6))
    assert_alike(again)


def test_replica_check_compares_the_shared_model_and_stops_after_join() -> None:
    """Forward passes see each rank's own unsent steps; a joined rank has an older model."""
    model, optimizer, _ = hooked(
        0.02, buckets={**SMALL_BUCKETS, "find_unused_parameters": True}, check_every=1
    )
    train(model, optimizer, range(4))
    with model.join():
        train(model, optimizer, range(4, 6 + 2 * RANK))
    assert_alike(model)


def test_ranks_that_run_out_of_batches_join() -> None:
    model, optimizer, _ = hooked(buckets={**SMALL_BUCKETS, "find_unused_parameters": True})
    with model.join():
        train(model, optimizer, range(2 + RANK))
    assert_alike(model)
    shared = torch.cat(
        [optimizer.state[p]["shared_exp_avg_sq"].reshape(-1) for p in model.parameters()]
    )
    assert all(torch.equal(shared, other) for other in hvd.allgather(shared[None]))


def messages_of(make: Callable[[Any], Any], **options: Any) -> list[str]:
    """Return the messages about an optimizer in two steps."""
    model = DistributedDataParallel(Net())
    optimizer = make(model.parameters())
    given = {"optimizer": optimizer} if options.pop("gives", False) else {}
    state = GTopKState(0.5, **given, **options)
    model.register_comm_hook(state, gtopk_hook)
    return [text for text in logged(lambda: train(model, optimizer, range(2))) if "Adam" in text]


def test_adamw_not_passed_to_the_hook_is_advised_against_once() -> None:
    messages = messages_of(torch.optim.AdamW)
    assert len(messages) == (RANK == 0)
    assert all("GTopKState(optimizer=optimizer)" in text for text in messages)
    assert not messages_of(torch.optim.AdamW, gives=True)
    messages = messages_of(torch.optim.NAdam, gives=True)
    assert len(messages) == (RANK == 0)
    assert all("raise the lr" in text for text in messages)
    assert len(messages_of(torch.optim.AdamW, gives=True, adam_steps="after")) == (RANK == 0)


def test_unusable_optimizers_of_a_hook_are_refused() -> None:
    model, optimizer, _ = hooked()
    loss(model, 0).backward()
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    raises(ValueError, other.step, "another AdamW steps its model")
    del other
    optimizer.step()
    some = torch.optim.AdamW([next(model.parameters())], lr=0.1)
    model = DistributedDataParallel(Net())
    model.register_comm_hook(GTopKState(0.1, optimizer=some), gtopk_hook)
    with pytest.raises(ValueError, match=r"does not step a parameter of shape \[12"):
        loss(model, 0).backward()
    with pytest.raises(ValueError, match="distributed already"):
        GTopKState(0.1, optimizer=distributed()[1])
    with pytest.raises(ValueError, match="local_residual=True is for"):
        GTopKState(0.1, local_residual=True)
    for no_optimizer in ([some], ramp(some, 9), model.parameters()):
        with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, .* got"):
            GTopKState(0.1, optimizer=no_optimizer)


def test_hook_state_replaced_by_a_newer_one_leaves_forward_passes_alone() -> None:
    model, optimizer, old = hooked(0.02)
    train(model, optimizer, range(3))
    center = weights(model)
    GTopKState(0.02, optimizer=optimizer)  # for example of a model that is wrapped again
    model.module(batch(0))
    assert torch.equal(weights(model), center)
    assert old.makes_adam_steps


def test_unknown_grad_scaler_may_not_unscale_the_steps() -> None:
    model, optimizer, _ = hooked()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model, 0)).backward()
    with pytest.raises(ValueError, match="GradScaler must be passed as scaler="):
        scaler.step(optimizer)


def test_trained_model_and_optimizer_are_freed() -> None:
    for options in ({}, {"local_residual": False}):
        model, optimizer, state = hooked(**options)
        train(model, optimizer, range(3))
        kept = [weakref.ref(each) for each in (next(model.parameters()), optimizer)]
        del model, optimizer, state
        # A busy thread of the hook may still be finishing the last step.
        until = time.monotonic() + 20
        while any(each() is not None for each in kept) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert not any(each() is not None for each in kept)


def test_hook_unwraps_an_optimizer_wrapped_by_a_trainer() -> None:
    model = DistributedDataParallel(Net(), **IN_ORDER)
    inner = adamw(model)
    prepared = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)
    state = GTopKState(0.1, optimizer=prepared)  # as Accelerate prepares one
    model.register_comm_hook(state, gtopk_hook)
    assert state.makes_adam_steps
    train(model, inner, range(3))
    other, optimizer, _ = hooked()
    train(other, optimizer, range(3))
    assert torch.equal(weights(model), weights(other))


def test_optimizer_passed_on_only_some_ranks_is_an_error() -> None:
    model = DistributedDataParallel(Net())
    optimizer = adamw(model)
    given = {"optimizer": optimizer} if RANK else {}
    model.register_comm_hook(GTopKState(0.1, **given), gtopk_hook)
    with pytest.raises(RuntimeError, match=r"(?s)adam_steps=after.*adam_steps=before"):
        loss(model, 0).backward()


def test_sgd_passed_to_the_hook_drops_skipped_steps() -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = GTopKState(0.1, optimizer=optimizer)
    model.register_comm_hook(state, gtopk_hook)
    begun = weights(model)
    ((torch.nan if RANK == 0 else 1.0) * loss(model, 0)).backward()
    optimizer.step()
    assert torch.equal(weights(model), begun)
    assert not state.makes_adam_steps
    train(model, optimizer, range(2))
    assert_alike(model)


def test_newest_hook_state_of_an_optimizer_replaces_earlier_ones() -> None:
    model = DistributedDataParallel(Net(), **IN_ORDER)
    optimizer = adamw(model)
    GTopKState(0.1, optimizer=optimizer)
    model.register_comm_hook(GTopKState(0.1, optimizer=optimizer), gtopk_hook)
    other, also, _ = hooked()
    train(model, optimizer, range(3))
    train(other, also, range(3))
    assert torch.equal(weights(model), weights(other))


def test_model_continues_with_another_hook_in_its_next_phase() -> None:
    def phase(net: torch.nn.Module, given: bool, **options: Any) -> Any:
        model = DistributedDataParallel(net, **IN_ORDER)
        kind = adamw if given else partial(torch.optim.SGD, lr=0.01, momentum=0.9)
        optimizer = kind(net) if given else kind(net.parameters())
        state = GTopKState(0.1, optimizer=optimizer if given else None, **options)
        model.register_comm_hook(state, gtopk_hook)
        train(model, optimizer, range(4))
        return model, optimizer, state

    # The first phase's objects stay alive in reference cycles until they are collected; force it.
    net = Net()
    first, optimizer, _ = phase(net, True)
    for given in (True, False):
        model, *_ = phase(net, given)
        assert_alike(model)
        center = weights(model)
        loss(model, 4)
        # Forward passes see the unsent steps of the last hook with Adam, and of no earlier one.
        assert torch.equal(weights(model), center) != given
        model.eval()
        loss(model, 4)
        model.train()
    expected = "another hook has taken over the model"
    raises(ValueError, lambda: train(first, optimizer, range(1)), expected)


def test_next_phase_may_step_another_optimizer_with_a_closure() -> None:
    """The first backward pass of the phase is then within step(), as with Lightning's Trainer."""
    first, optimizer, _ = hooked()
    train(first, optimizer, range(2))
    model = DistributedDataParallel(first.module, **IN_ORDER)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    model.register_comm_hook(GTopKState(0.1), gtopk_hook)

    def closure() -> torch.Tensor:
        sgd.zero_grad()
        value = loss(model, 2)
        value.backward()
        return value

    before = weights(model)
    sgd.step(closure)
    assert_alike(model)
    assert not torch.equal(weights(model), before)


def test_hook_adamw_with_clipping_learns_as_well_as_dense_adamw() -> None:
    """On the same task, with as many steps and the same rate."""
    target = torch.randn(12, 12, generator=torch.Generator().manual_seed(5))

    def final_loss(hooks: bool) -> float:
        model = DistributedDataParallel(torch.nn.Linear(12, 12, bias=False))
        torch.nn.init.zeros_(model.module.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.0)
        if hooks:
            state = GTopKState(0.1, optimizer=optimizer, global_clip_norm=1.0)
            model.register_comm_hook(state, gtopk_hook)
        for step in range(100):
            x = batch(step, dtype=torch.float32)
            optimizer.zero_grad()
            (model(x) - x @ target).square().mean().backward()
            if not hooks:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return float((model.module.weight.detach() - target.T).square().mean())

    dense, ours = final_loss(False), final_loss(True)
    begun = float(target.square().mean())
    assert dense < 0.005 * begun, dense
    assert ours < 0.005 * begun, ours


def main() -> None:
    run_tests(globals())
    print(f"rank {RANK}: the hook makes AdamW's steps\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
