"""Buckets are exchanged while backward goes on, and nobody can tell but by the time it takes."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk import process_sets, world
from gtopk.compression import Compression
from gtopk.optimizer import DistributedOptimizer
from gtopk.reductions import Average, Sum
from tests.gtopk.four_layers import EACH_ALONE, distribute, flat, inputs, layers
from tests.gtopk.held import held

STEPS = 4


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
def test_random_models_train_as_one_process_would(data):
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
def test_nothing_is_lost_in_any_buckets(data):
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
                steps.append((before, gradient / size, update, held(optimizer)))
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert optimizer.last_step.buckets == len(widths)
        return steps

    for ranks in zip(*run_ranks(local_world(size, 30), program), strict=True):
        before, added, updates, after = (np.stack(column) for column in zip(*ranks, strict=True))
        assert (updates == updates[0]).all()
        np.testing.assert_allclose(
            updates[0] + after.sum(0), before.sum(0) + added.sum(0), rtol=0, atol=1e-12
        )


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


def half_way(model: torch.nn.Sequential, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    return model[2:](CallInBackward.apply(model[:2](x), call)).square().sum()


def test_buckets_are_exchanged_while_backward_goes_on(threads):
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
                half_way(model, inputs(transport.rank, step), call).backward()
                optimizer.step()
                assert optimizer._handles == {}
            return optimizer.last_step

    for report in threads(2, program):
        assert report.buckets == 4
        assert 0.0 < report.hidden_seconds < report.working_seconds


def train(transport: LocalTransport, compression: Any, disturb: Any = None, **options: Any) -> Any:
    """Return the parameters after some steps, of which `disturb` sees each after backward."""
    model = layers()
    with world.entered(transport):
        optimizer = distribute(model, compression, **options)
        for step in range(5):
            optimizer.zero_grad()
            model(inputs(transport.rank, step)).square().sum().backward()
            if disturb is not None:
                disturb(model, optimizer, step)
            optimizer.step()
        return flat(model), held(optimizer), optimizer


KINDS = [
    Compression.none,
    Compression.fp16,
    Compression.topk(0.3),
    Compression.gtopk(0.3, momentum_correction=0.5),
    Compression.oktopk(0.3),
    Compression.gtopk(0.3, dense="2.*", momentum_correction=0.5),
]


@pytest.mark.parametrize("compression", KINDS, ids=repr)
def test_overlap_changes_no_bit(threads, compression):
    ways = [
        threads(3, lambda t, o=overlap: train(t, compression, overlap=o)[:2])
        for overlap in (True, False)
    ]
    for with_overlap, without in zip(*ways, strict=True):
        for one, other in zip(with_overlap, without, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("compression", KINDS, ids=repr)
def test_a_late_gradient_that_is_not_finite_takes_back_what_early_buckets_changed(
    threads, compression
):
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


def clip_in_place(model: Any, optimizer: Any, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (step + 1))


def clip_behind_torch(model: Any, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5 * (step + 1))


def put_others(model: Any, optimizer: Any, step: int) -> None:
    model[3].weight.grad = torch.full_like(model[3].weight, 0.1)


@pytest.mark.parametrize("disturb", [clip_in_place, clip_behind_torch, put_others])
@pytest.mark.parametrize("on_one_rank", [False, True])
def test_gradients_changed_after_backward_are_those_that_count(
    threads, caplog, disturb, on_one_rank
):
    def sometimes(model: Any, optimizer: Any, step: int) -> None:
        if optimizer._world.rank == 1 or not on_one_rank:
            disturb(model, optimizer, step)

    with caplog.at_level(logging.INFO, "gtopk"):
        early = threads(3, lambda t: train(t, Compression.gtopk(0.3), sometimes)[:2])
    assert sum("without overlap" in record.getMessage() for record in caplog.records) == 3
    late = threads(3, lambda t: train(t, Compression.gtopk(0.3), sometimes, overlap=False)[:2])
    for one, other in zip(early, late, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize("on_one_rank", [False, True])
def test_a_batch_dropped_after_early_buckets_were_exchanged_leaves_no_trace(threads, on_one_rank):
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


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_distributed_optimizer_is_not_copied(copy_of):
    with world.entered(local_world(1)[0]):
        optimizer = distribute(layers())
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            copy_of(optimizer)


def test_several_optimizers_and_models_step_in_any_order(threads):
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


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.3)], ids=repr)
def test_dividing_before_the_sum_and_multiplying_after_it_changes_nothing_but_the_range(
    threads, compression, factor
):
    """Powers of two are exact."""
    plain = threads(2, lambda t: train(t, compression)[:2])
    divided = threads(2, lambda t: train(t, compression, gradient_predivide_factor=factor)[:2])
    for one, other in zip(plain, divided, strict=True):
        assert torch.equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1] * factor)


def test_a_predivide_factor_keeps_a_sum_from_overflowing(threads):
    def program(transport: LocalTransport, factor: float) -> bool:
        parameter = torch.nn.Parameter(torch.zeros(3))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1e-38),
                compression=Compression.fp16,
                gradient_predivide_factor=factor,
            )
            parameter.grad = torch.full_like(parameter, 6e4 * 4)
            optimizer.step()
        return optimizer.last_step.skipped

    assert threads(2, lambda t: program(t, 1.0)) == [True, True]
    assert threads(2, lambda t: program(t, 16.0)) == [False, False]


class Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(9, 3, sparse=True).double()
        self.after = torch.nn.Linear(3, 2).double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=generator)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.after(self.rows(at)).square().sum()


@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_sparse_gradients_train_as_one_process_would(threads, op, as_dense, absent):
    """Also where a rank looks up nothing at all."""
    size = 3

    def indices(rank: int, step: int) -> torch.Tensor:
        return torch.tensor([rank, (rank + step) % 9, rank]) if rank or not absent else None

    def value(model: Embedded, rank: int, step: int) -> torch.Tensor:
        at = indices(rank, step)
        return model(at) if at is not None else model.after(torch.ones(1, 3).double()).sum()

    def program(transport: LocalTransport) -> torch.Tensor:
        model = Embedded()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                model.named_parameters(),
                op=op,
                sparse_as_dense=as_dense,
                missing_gradients="zeros",
            )
            for step in range(3):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                optimizer.synchronize()
                assert model.rows.weight.grad.is_sparse != as_dense
                with optimizer.skip_synchronize():
                    optimizer.step()
        return flat(model)

    alone = Embedded()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        total = sum(value(alone, rank, step) for rank in range(size))
        (total / size if op == Average else total).backward()
        optimizer.step()
    replicas = threads(size, program)
    torch.testing.assert_close(replicas[0], flat(alone), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


def test_a_gradient_that_becomes_sparse_is_planned_anew(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = Embedded()
        model.rows.sparse = False
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            for step in range(4):
                model.rows.sparse = step >= 2
                optimizer.zero_grad()
                model(torch.tensor([transport.rank, step])).backward()
                optimizer.step()
        return flat(model)

    replicas = threads(2, program)
    assert torch.equal(*replicas)


@pytest.mark.parametrize("sparse_value", [float("nan"), float("inf")])
def test_a_sparse_gradient_that_is_not_finite_skips_the_step(threads, sparse_value):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = Embedded()
        with world.entered(transport):
            optimizer = distribute(model)
            before = flat(model)
            model(torch.tensor([transport.rank, 3])).backward()
            if transport.rank:
                model.rows.weight.grad._values()[0, 0] = sparse_value
            optimizer.step()
            assert optimizer.last_step.skipped
            assert torch.equal(before, flat(model))

    threads(2, program)


@pytest.mark.parametrize("groups", [1, 2, 3, "lists"])
def test_groups_are_buckets(threads, groups):
    def program(transport: LocalTransport) -> Any:
        model = layers()
        made = groups
        if groups == "lists":
            made = [[model[0].weight, model[3].weight]]
        with world.entered(transport):
            optimizer = distribute(model, bucket_bytes=None, groups=made)
            model(inputs(transport.rank, 0)).square().sum().backward()
            optimizer.step()
            return [lane.names for lane in optimizer._reducer.lanes]

    for buckets in threads(2, program):
        if groups == "lists":
            assert sorted(map(sorted, buckets)) == [
                ["0.weight", "3.weight"],
                ["1.weight", "2.weight"],
            ]
        else:
            assert len(buckets) == groups


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"groups": 0}, "at least 1"),
        ({"groups": "two"}, "integer or a list of lists"),
        ({"groups": [1, 2]}, "integer or a list of lists"),
        ({"groups": 2, "bucket_bytes": 5}, "not both"),
        ({"bucket_bytes": -1}, "0 or more"),
        ({"local_clip_norm": 0.0}, "above 0"),
        ({"check_every": -1}, "0 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    with (
        world.entered(local_world(1)[0]),
        pytest.raises((ValueError, TypeError), match=said),
    ):
        DistributedOptimizer(torch.optim.SGD(layers().parameters(), lr=0.1), **arguments)


def test_a_parameter_is_in_one_group_at_most():
    model = layers()
    with world.entered(local_world(1)[0]), pytest.raises(ValueError, match="twice"):
        DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            groups=[[model[0].weight], [model[0].weight]],
        )


def test_num_groups_is_deprecated_as_in_horovod():
    with world.entered(local_world(1)[0]), pytest.warns(DeprecationWarning, match="groups"):
        DistributedOptimizer(torch.optim.SGD(layers().parameters(), lr=0.1), num_groups=2)


def test_what_scripts_read_of_horovods_optimizer_is_there(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, backward_passes_per_step=2)
            first = model[0].weight
            assert optimizer._parameter_names[first] == "0.weight"
            assert optimizer.op == Average
            assert optimizer.gradient_predivide_factor == 1.0
            assert optimizer._compression == Compression.gtopk(0.3)
            assert optimizer._requires_update == set(model.parameters())
            assert optimizer._allreduce_delay[first] == 2
            model(inputs(transport.rank, 0)).sum().backward()
            assert optimizer._allreduce_delay[first] == 1
            optimizer.set_backward_passes_per_step(1)
            assert optimizer.backward_passes_per_step == 1
            optimizer.step()

    threads(2, program)


def test_ranks_of_a_process_set_reduce_together_and_others_step_alone(threads):
    def program(transport: LocalTransport) -> Any:
        model, alone = layers(), layers()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        with world.entered(transport):
            pair = process_sets.ProcessSet([0, 2])
            process_sets.register(pair)
            optimizer = distribute(model, Compression.gtopk(1.0), process_set=pair)
            assert optimizer.process_set is pair
            for step in range(3):
                for each, of in ((optimizer, model), (plain, alone)):
                    each.zero_grad()
                    of(inputs(transport.rank, step)).square().sum().backward()
                    each.step()
            state = optimizer.gather_state(2) if pair.included() else None
            assert (state is None) == (transport.rank != 2)
        return flat(model), flat(alone)

    first, other, last = threads(3, program)
    assert torch.equal(*other)
    assert torch.equal(first[0], last[0])
    assert not torch.equal(*first)


def test_what_was_held_back_goes_into_the_next_world():
    """As after elastic's recovery, here with fewer ranks."""
    models = [layers() for _ in range(3)]
    optimizers: list[Any] = [None] * 3

    def train(transport: LocalTransport) -> tuple[np.ndarray, np.ndarray]:
        rank = transport.rank
        with world.entered(transport):
            optimizers[rank] = optimizers[rank] or distribute(models[rank])
            before = held(optimizers[rank])
            for step in range(3):
                optimizers[rank].zero_grad()
                models[rank](inputs(rank, step)).square().sum().backward()
                optimizers[rank].step()
                if step == 0:
                    after_one = held(optimizers[rank])
            return before, after_one

    run_ranks(local_world(3, 30), train)
    left = [held(optimizer) for optimizer in optimizers]
    for rank, (before, after_one) in enumerate(run_ranks(local_world(2, 30), train)):
        np.testing.assert_array_equal(before, left[rank])
        assert after_one.any()
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize(
    "compression", [Compression.none, Compression.gtopk(0.3), Compression.topk(1.0)], ids=repr
)
@pytest.mark.parametrize("missing", ["error", "zeros"])
def test_ranks_without_batches_join_and_what_they_hold_back_is_sent(threads, compression, missing):
    batches = [6, 3, 4]

    def program(transport: LocalTransport) -> Any:
        model, left = layers(), []
        with world.entered(transport) as here:
            optimizer = distribute(model, compression, missing_gradients=missing)
            for step in range(batches[transport.rank]):
                optimizer.zero_grad()
                model(inputs(transport.rank, step)).square().sum().backward()
                if step == 4 and transport.rank == 0:
                    model[1].weight.grad[0, 0] = float("nan")
                optimizer.step()
                left.append(optimizer.last_step.skipped)
            before = held(optimizer)
            last = here.engine.join().wait()
            assert optimizer._handles == {}
            return flat(model), before, held(optimizer), left, last

    ranks = threads(3, program)
    assert ranks[0][3] == [False, False, False, False, True, False]
    assert {rank[4] for rank in ranks} == {0}
    assert torch.isfinite(ranks[0][0]).all()
    if isinstance(compression, type) or compression.density == 1.0:
        return
    for _, before, after, _, _ in ranks[1:]:
        assert np.abs(before).sum() > 0
        assert (before != after).any()
