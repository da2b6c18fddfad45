"""Buckets are exchanged during backward, with the same results as after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression
from gtopk.exchange.bucket_exchange import BucketExchange
from gtopk.optim import reducer
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.expected_step import ExpectedStep
from gtopk.optim.gradient_checks import refuse_ddp
from gtopk.optim.step_transaction import StepTransaction
from gtopk.reduce_ops import Adasum, Average
from gtopk.runtime.world import world
from tests.gtopk.four_layers import EACH_ALONE, distribute, flat, inputs, layers, train
from tests.gtopk.held import held

STEPS = 4


@pytest.mark.parametrize(
    ("options", "is_planned"),
    [({"bucket_bytes": None}, True), ({"bucket_bytes": 80}, False), ({"groups": 2}, False)],
)
def test_expected_step_is_told_whether_buckets_were_planned(options, is_planned, monkeypatch):
    """Its message says which; given buckets would be the same for the alternative."""
    planned: list[bool] = []

    class Noted(ExpectedStep):
        def __init__(self, *arguments: Any, is_planned: bool = False) -> None:
            planned.append(is_planned)
            super().__init__(*arguments, is_planned=is_planned)

    monkeypatch.setattr(reducer, "ExpectedStep", Noted)
    with world.entered(local_world(1)[0]):
        distribute(layers(), **{"bucket_bytes": None, **options})
    assert planned == [is_planned]


class Branches(torch.nn.Module):
    """Linear maps in any order, some shared, of which a step uses some."""

    def __init__(self, widths: list[int], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.maps = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(width, 3, generator=generator, dtype=torch.float64))
            for width in widths
        )

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        total = x.sum() * 0
        for place, number in enumerate(used):
            total = total + torch.tanh((place + 1) * x @ self.maps[number].t()).square().sum()
        return total


def backward(model: Branches, used: list[int], rank: int, step: int, passes: int = 1) -> None:
    for each in range(passes):
        generator = torch.Generator().manual_seed(100 * step + 10 * each + rank)
        model(torch.randn(4, 3, generator=generator, dtype=torch.float64), used).backward()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_models_train_as_one_process(data):
    """At density 1, whatever is used on whatever rank and in whatever order, in any buckets."""
    size = data.draw(st.sampled_from([2, 3]), label="size")
    widths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6), label="widths")
    # A branch may be used twice: its parameter is shared.
    uses = st.lists(st.integers(0, len(widths) - 1), min_size=1, max_size=2 * len(widths))
    used = [[data.draw(uses) for _ in range(size)] for _ in range(STEPS)]
    passes = data.draw(st.sampled_from([1, 1, 3]), label="passes")
    compression = data.draw(
        st.sampled_from(
            [
                Compression.none,
                Compression.gtopk(1.0),
                Compression.oktopk(1.0),
                Compression.gtopk(1.0, dense_under=4),
            ]
        )
    )
    buckets = data.draw(st.sampled_from([{}, EACH_ALONE, {"bucket_bytes": 80}, {"groups": 2}]))
    overlap = data.draw(st.booleans(), label="overlap")

    def program(transport: LocalTransport) -> torch.Tensor:
        model = Branches(widths, 0)
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                model.named_parameters(),
                compression,
                passes,
                missing_gradients="zeros",
                overlap=overlap,
                **buckets,
            )
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(model, used[step][transport.rank], transport.rank, step, passes)
                optimizer.step()
        return flat(model)

    alone = Branches(widths, 0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            backward(alone, used[step][rank], rank, step, passes)
        for parameter in alone.parameters():
            if parameter.grad is not None:
                parameter.grad /= size
        optimizer.step()
    replicas = run_ranks(local_world(size, 30), program)
    torch.testing.assert_close(replicas[0], flat(alone), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_gradient_mass_is_conserved_with_one_bucket_per_parameter(data):
    size = data.draw(st.sampled_from([2, 3]), label="size")
    widths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=6), label="widths")
    density = data.draw(st.floats(0.01, 0.9), label="density")
    every = list(range(len(widths)))

    def program(transport: LocalTransport) -> Any:
        model = Branches(widths, 1)
        steps = []
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                Compression.gtopk(density),
                **EACH_ALONE,
            )
            for step in range(STEPS):
                before = held(optimizer)
                optimizer.zero_grad()
                backward(model, every, transport.rank, step)
                gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
                optimizer.synchronize()
                update = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
                with optimizer.skip_synchronize():
                    optimizer.step()
                steps.append((before, gradient / size, update, held(optimizer)))
            assert optimizer.last_step.buckets == len(widths)
        return steps

    for ranks in zip(*run_ranks(local_world(size, 30), program), strict=True):
        before, added, updates, after = (np.stack(column) for column in zip(*ranks, strict=True))
        assert (updates == updates[0]).all()
        np.testing.assert_allclose(
            updates[0] + after.sum(0), before.sum(0) + added.sum(0), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    "options",
    [
        {"compression": Compression.gtopk(0.3, dense_under=2)},
        {"compression": Compression.gtopk(0.3, dense_vectors=True)},
        {"compression": Compression.gtopk(0.3), "groups": 5, "bucket_bytes": None},
        {"compression": Compression.none, "groups": 5, "bucket_bytes": None},
    ],
    ids=repr,
)
def test_empty_parameter_changes_no_result(threads, options):
    """Also where it would be all of a bucket; its gradient is not exchanged."""

    def program(transport: LocalTransport, extra: bool) -> torch.Tensor:
        model = layers()
        if extra:
            model.register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
        with world.entered(transport):
            optimizer = distribute(model, **options)
            for step in range(3):
                optimizer.zero_grad()
                loss = model(inputs(transport.rank, step)).square().sum()
                if extra and (step == 1 or transport.rank == 0):
                    loss = loss + model.empty.sum()
                loss.backward()
                optimizer.step()
            if extra:
                model.requires_grad_(False)
                model.empty.requires_grad_()
                optimizer.zero_grad()
                optimizer.step()
        return flat(model)

    one, other = (threads(2, lambda t, e=extra: program(t, e)) for extra in (True, False))
    assert all(map(torch.equal, one, other))
    assert torch.equal(*one)


class CallInBackward(torch.autograd.Function):
    """Calls a function in the middle of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient, None


def loss_with_call_midway(
    model: torch.nn.Sequential, x: torch.Tensor, call: Callable[[], None]
) -> torch.Tensor:
    return model[2:](CallInBackward.apply(model[:2](x), call)).square().sum()


def test_buckets_are_exchanged_during_backward(threads):
    """The second half of backward waits for the exchange of what the first half has computed."""

    def program(transport: LocalTransport) -> Any:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)

            def wait() -> None:
                handles = optimizer._handles
                assert set(handles) == {model[3].weight, model[2].weight}
                for handle in handles.values():
                    handle.wait()

            for step in range(3):
                optimizer.zero_grad()
                call = wait if step else (lambda: None)  # the order is learnt in the first step
                loss_with_call_midway(model, inputs(transport.rank, step), call).backward()
                optimizer.step()
                assert optimizer._handles == {}
            return optimizer.last_step

    for report in threads(2, program):
        assert report.buckets == 4
        assert 0.0 < report.hidden_seconds < report.working_seconds


KINDS = [
    Compression.none,
    Compression.fp16,
    Compression.bf16,
    Compression.topk(0.3),
    Compression.gtopk(0.3, momentum_correction=0.5),
    Compression.oktopk(0.3),
    Compression.gtopk(0.3, dense="2.*", momentum_correction=0.5),
    Compression.gtopk(0.3, dense="2.*", adam_correction=(0.9, 0.99)),
]


@pytest.mark.parametrize("compression", KINDS, ids=repr)
def test_overlap_gives_bit_identical_results(threads, compression):
    ways = [
        threads(3, lambda t, o=overlap: train(t, compression, overlap=o))
        for overlap in (True, False)
    ]
    for with_overlap, without in zip(*ways, strict=True):
        for one, other in zip(with_overlap, without, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# A rank that does not check its gradients first, as on a GPU, checks their sum.
BLIND_RANKS = {"all": (), "some": (1,), "none": (0, 1)}


@pytest.fixture(params=BLIND_RANKS)
def checking_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which ranks check their gradients before they send their flags."""
    blind = BLIND_RANKS[request.param]
    checks_finite_first = property(lambda bucket_exchange: world.current().rank not in blind)
    monkeypatch.setattr(BucketExchange, "checks_finite_first", checks_finite_first)
    return request.param


@pytest.mark.parametrize("compression", KINDS, ids=repr)
@pytest.mark.usefixtures("checking_ranks")
def test_late_nonfinite_gradient_undoes_early_buckets(threads, compression):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            for step in range(6):
                optimizer.zero_grad()
                before = held(optimizer).tobytes(), held(optimizer, "velocity").tobytes()
                x = inputs(transport.rank, step)

                def spoil(grad: torch.Tensor, step: int = step) -> torch.Tensor:
                    assert len(optimizer._handles) == (3 if step else 0)
                    for handle in optimizer._handles.values():
                        handle.wait()
                    return grad * float("nan") if transport.rank == 1 and step == 4 else grad

                hook = model[0].weight.register_hook(spoil)
                model(x).square().sum().backward()
                hook.remove()
                optimizer.step()
                after = held(optimizer).tobytes(), held(optimizer, "velocity").tobytes()
                assert optimizer.last_step.skipped == (step == 4)
                if step == 4:
                    assert before == after

    threads(2, program)


@pytest.mark.parametrize("where", ["0.weight", "3.weight"])  # the last to come, and the first
@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.3)], ids=repr)
@pytest.mark.usefixtures("checking_ranks")
def test_nonfinite_gradient_is_named_on_every_rank_and_changes_nothing(threads, compression, where):
    def program(transport: LocalTransport) -> list[bytes]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, compression, max_skipped_steps=0)
            for step in range(4):
                optimizer.zero_grad()
                spoilt = transport.rank == 1 and step == 3

                def spoil(grad: torch.Tensor, spoilt: bool = spoilt) -> torch.Tensor:
                    return grad * float("nan") if spoilt else grad

                hook = dict(model.named_parameters())[where].register_hook(spoil)
                model(inputs(transport.rank, step)).square().sum().backward()
                hook.remove()
                if step < 3:
                    optimizer.step()
            with pytest.raises(FloatingPointError, match=rf"on rank 1: '{where}'"):
                optimizer.step()
        return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]

    one, other = threads(2, program)
    assert one == other


@pytest.mark.parametrize("op", [Average, Adasum])
def test_load_state_dict_restarts_the_count_of_skipped_steps_in_a_row(threads, op):
    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        with world.entered(transport):
            inner = torch.optim.SGD([parameter], lr=1.0)
            optimizer = DistributedOptimizer(inner, [("p", parameter)], op=op, max_skipped_steps=1)
            state = optimizer.state_dict()
            for _ in range(2):
                for n in range(2):
                    parameter.grad = torch.full((2,), torch.nan)
                    with pytest.raises(FloatingPointError) if n else nullcontext():
                        optimizer.step()
                optimizer.load_state_dict(state)
            assert optimizer.skipped_steps == 4

    threads(2, program)


@pytest.mark.parametrize("where", ["0.weight", "3.weight"])
def test_nonfinite_gradient_that_is_not_found_again_skips_the_step(threads, monkeypatch, where):
    monkeypatch.setattr(BucketExchange, "not_finite", lambda self: [])

    def program(transport: LocalTransport) -> list[bytes]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.3))
            for step in range(4):
                optimizer.zero_grad()
                model(inputs(transport.rank, step)).square().sum().backward()
                if step == 3:
                    before = [parameter.detach().clone() for parameter in model.parameters()]
                    if transport.rank == 1:
                        dict(model.named_parameters())[where].grad.fill_(float("nan"))
                optimizer.step()
            assert optimizer.skipped_steps == 1
        assert all(map(torch.equal, before, model.parameters()))
        return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]

    one, other = threads(2, program)
    assert one == other


def clip_in_place(model: Any, optimizer: Any, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (step + 1))


def clip_behind_torch(model: Any, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5 * (step + 1))


def await_early_lanes(optimizer: Any) -> None:
    """What was submitted in the backward pass has been read by then."""
    for handle in optimizer._handles.values():
        handle.wait()


def clamp_behind_torch(model: Any, optimizer: Any, step: int) -> None:
    await_early_lanes(optimizer)
    for parameter in model.parameters():
        largest = float(parameter.grad.abs().max())
        parameter.grad.data.clamp_(-0.9 * largest, 0.9 * largest)


def clip_by_numpy(model: Any, optimizer: Any, step: int) -> None:
    await_early_lanes(optimizer)
    for parameter in model.parameters():
        array = parameter.grad.numpy()
        np.clip(array, -0.9 * abs(array).max(), 0.9 * abs(array).max(), out=array)


def negate_behind_torch(model: Any, optimizer: Any, step: int) -> None:
    await_early_lanes(optimizer)
    for parameter in model.parameters():
        parameter.grad.data.neg_()


def put_others(model: Any, optimizer: Any, step: int) -> None:
    model[3].weight.grad = torch.full_like(model[3].weight, 0.1)


@pytest.mark.parametrize(
    "disturb",
    [
        clip_in_place,
        clip_behind_torch,
        clamp_behind_torch,
        negate_behind_torch,
        clip_by_numpy,
        put_others,
    ],
)
@pytest.mark.parametrize("on_one_rank", [False, True])
def test_gradients_changed_after_backward_are_exchanged_as_changed(
    threads, caplog, monkeypatch, disturb, on_one_rank
):
    # A factor common to all values shows in a sample of them; other changes need all values.
    checks_all = disturb in (clamp_behind_torch, clip_by_numpy)
    monkeypatch.setenv("GTOPK_CHECK_GRADIENTS", f"{checks_all:d}")

    def sometimes(model: Any, optimizer: Any, step: int) -> None:
        if optimizer._world.rank == 1 or not on_one_rank:
            disturb(model, optimizer, step)

    with caplog.at_level(logging.INFO, "gtopk"):
        early = threads(3, lambda t: train(t, Compression.gtopk(0.3), sometimes))
    messages = [r.getMessage() for r in caplog.records if "without overlap" in r.getMessage()]
    assert len(messages) == 3
    assert all("changed between backward() and step()" in text for text in messages)
    assert all("call optimizer.synchronize() before changing them" in text for text in messages)
    late = threads(3, lambda t: train(t, Compression.gtopk(0.3), sometimes, overlap=False))
    for one, other in zip(early, late, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize("on_one_rank", [False, True])
def test_batch_dropped_after_early_buckets_changes_nothing(threads, on_one_rank):
    def program(transport: LocalTransport, drops: bool) -> Any:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            for step in range(5):
                dropping = drops and step in (1, 3) and (transport.rank == 1 or not on_one_rank)
                for other in (77, 78) if dropping else ():
                    model(inputs(transport.rank, other)).square().sum().backward()
                    optimizer.zero_grad()
                model(inputs(transport.rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return flat(model), held(optimizer)

    dropped = threads(3, lambda t: program(t, drops=True))
    plain = threads(3, lambda t: program(t, drops=False))
    for one, other in zip(dropped, plain, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1].tobytes() == other[1].tobytes()


def test_interrupted_step_is_undone_and_logged(monkeypatch, caplog):
    """Ctrl-C takes effect once the other ranks have ended the step, which may take long."""
    ended = StepTransaction.finish

    def finish(self: StepTransaction, unplanned: bool, preempted: bool) -> None:
        ended(self, unplanned, preempted)
        raise KeyboardInterrupt

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(inputs(0, number)).square().sum().backward()
        optimizer.step()

    with world.entered(local_world(1)[0]):
        model = layers()
        optimizer = distribute(model)
        step(0)
        before = held(optimizer)
        monkeypatch.setattr(StepTransaction, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            step(1)
        np.testing.assert_array_equal(held(optimizer), before)
    assert "rank 0: interrupted (KeyboardInterrupt) mid-step" in caplog.text


def test_several_optimizers_may_step_in_any_order(threads):
    def program(transport: LocalTransport) -> Any:
        models = [layers(), layers()]
        with world.entered(transport):
            optimizers = [distribute(model) for model in models]
            for step in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                x = inputs(transport.rank, step)
                (models[1](models[0](x)).square().sum() + models[1](x).sum()).backward()
                for number in (0, 1) if step % 2 else (1, 0):
                    optimizers[number].step()
        return torch.cat([flat(model) for model in models])

    replicas = threads(3, program)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.2)])
def test_two_optimizers_that_step_after_one_backward_pass_raise(threads, compression) -> None:
    """The second would exchange what the first has agreed on; each after a pass of its own may."""

    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            model = torch.nn.Linear(4, 3)
            first, second = (
                DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    model.named_parameters(),
                    compression,
                )
                for _ in "ab"
            )
            for step in range(4):
                for optimizer in (first, second):
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
            message = "two DistributedOptimizers step parameter 'weight' after one backward pass"
            first.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            first.step()
            with pytest.raises(ValueError, match=message):
                second.step()

    threads(2, program)


def test_model_wrapped_in_ddp_is_refused(monkeypatch) -> None:
    def walk() -> None:
        raise AssertionError("a walk over all objects disturbs other threads")

    monkeypatch.setattr("gc.get_objects", walk)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        refuse_ddp(model.parameters())
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        message = "DistributedDataParallel and DistributedOptimizer both"
        for parameters in (model.parameters(), ddp.parameters(), [model[1].weight]):
            with pytest.raises(ValueError, match=message):
                refuse_ddp(parameters)
        refuse_ddp(torch.nn.Linear(2, 2).parameters())
    finally:
        torch.distributed.destroy_process_group()
