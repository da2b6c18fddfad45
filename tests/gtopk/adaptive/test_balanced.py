"""The laws of balanced batches, on ranks that are threads of this process."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.indices import Indices, indices_of
from tests.gtopk.adaptive.modelled_ranks import (
    Modelled,
    data,
    mean_loss,
    network,
    on_ranks,
    sgd,
    some_optimizer,
    step_on,
)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sum_loss(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((prediction - y) ** 2).sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.gtopk(density=1.0)])
def test_sending_all_entries_equals_single_process_on_the_global_batch(
    size: int, compression: Any, reduction: str
) -> None:
    """Sizes change, some are zero, and the last step is partial."""
    samples, together = data(101), 24
    loss = mean_loss if reduction == "mean" else sum_loss

    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model, compression)
        loader = hvd.adapt(
            DataLoader(samples, together // size, shuffle=True),
            optimizer,
            min_batch=0,
            interval=1,
            loss_reduction=reduction,
            timer=Modelled(10.0 ** (here.rank % 3)),
        )
        sizes = []
        for _ in range(3):
            for batch in loader:
                sizes.append(loader.sizes)
                step_on(model, optimizer, batch, loss)
        return flat(model), sizes

    results = on_ranks(size, program)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        order = torch.randperm(101, generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(together):
            step_on(model, optimizer, samples[indices], mean_loss)
    for parameters, sizes in results:
        assert sizes == results[0][1]
        assert torch.equal(parameters, results[0][0])
        torch.testing.assert_close(parameters, flat(model), rtol=1e-12, atol=1e-14)
    if size > 1:
        assert len({tuple(each) for each in results[0][1]}) > 2
        assert any(0 in each for each in results[0][1])


def test_equal_batches_train_like_unadapted_loader_bitwise() -> None:
    samples, size = data(96), 4

    def program(here: World) -> Any:
        model, plain = network(), network()
        optimizer, unadapted = (
            sgd(each, hvd.Compression.gtopk(density=0.2)) for each in (model, plain)
        )
        loader = hvd.adapt(DataLoader(samples, 6), optimizer, timer=Modelled(1.0))
        for step, batch in enumerate(loader):
            step_on(model, optimizer, batch, mean_loss)
            first = step * 6 * size + here.rank * 6
            step_on(plain, unadapted, samples[first : first + 6], mean_loss)
        assert loader.sizes == [6] * size
        return torch.equal(flat(model), flat(plain))

    assert on_ranks(size, program) == [True] * size


def test_sums_and_residuals_are_conserved_while_sizes_change() -> None:
    """Sent so far + residuals = weighted gradients so far, whatever the sizes; B doubles, too."""

    def program(here: World) -> Any:
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), hvd.Compression.gtopk(density=0.15)
        )
        generator = torch.Generator().manual_seed(here.rank)
        sent = torch.zeros_like(flat(model))
        weighted = torch.zeros_like(sent)
        for step in range(30):
            sizes = [(rank + step) % 4 * (2 if step > 15 else 1) for rank in range(here.size)]
            count = sizes[here.rank]
            optimizer.set_num_samples(count)
            for parameter in model.parameters():
                shape = parameter.shape
                parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            weighted += count / sum(sizes) * gradient
            optimizer.step()
            sent += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        parts = {
            parameter: part
            for bucket_exchange in optimizer._reducer.planned.bucket_exchanges
            for parameter, part in zip(
                bucket_exchange.parameters,
                torch.from_numpy(bucket_exchange.exchange.residual.values.copy()).split(
                    [parameter.numel() for parameter in bucket_exchange.parameters]
                ),
                strict=True,
            )
        }
        residual = torch.cat([parts[parameter] for parameter in model.parameters()])
        return sent, residual, weighted

    results = on_ranks(4, program)
    left = results[0][0] + sum(residual for _, residual, _ in results)
    expected = sum(weighted for _, _, weighted in results)
    torch.testing.assert_close(left, expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(sent, results[0][0]) for sent, _, _ in results)


def test_nonfinite_gradient_of_rank_without_samples_is_ignored() -> None:
    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model)
        optimizer.set_num_samples(here.rank)
        for parameter in model.parameters():
            value = float("nan") if here.rank == 0 else float(here.rank)
            parameter.grad = torch.full_like(parameter, value)
        optimizer.synchronize()
        return optimizer.skipped_steps, next(model.parameters()).grad[0, 0].item()

    for skipped, gradient in on_ranks(3, program):
        assert skipped == 0
        assert gradient == pytest.approx((1 * 1 + 2 * 2) / 3)


def test_tokens_of_placeholder_batch_get_no_weight() -> None:
    """The script sets its tokens with every batch; the last step has 3 samples for 4 ranks."""
    x, tokens = data(15).tensors[0], torch.arange(15) % 4 + 1

    def program(here: World) -> Any:
        weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        loader = hvd.adapt(DataLoader(Indices(15), 3), optimizer, min_batch=0)
        for batch in loader:
            optimizer.zero_grad()
            optimizer.set_num_samples(int(tokens[batch].sum()))
            ((x[batch] @ weight) @ tokens[batch].double() / tokens[batch].sum()).backward()
            before = weight.detach().clone()
            optimizer.step()
        last = before - weight.detach()
        got_placeholder = loader.num_samples == 0
        optimizer.set_num_samples(7)  # the script's own step, after the epoch
        return last, got_placeholder, optimizer._reducer.samples.count

    expected = (x * tokens[:, None])[12:].sum(0) / tokens[12:].sum()
    results = on_ranks(4, program)
    assert [got_placeholder for _, got_placeholder, _ in results].count(True) == 1
    for last, _, count in results:
        torch.testing.assert_close(last, expected)
        assert count == 7


def test_set_num_samples_on_some_ranks_only_raises() -> None:
    def program(here: World) -> None:
        optimizer = some_optimizer()
        if here.rank == 1:
            optimizer.set_num_samples(4)
        with pytest.raises(hvd.HorovodInternalError, match="rank 0: gradients weighted alike"):
            optimizer.step()

    on_ranks(2, program)


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data(96))


@pytest.mark.parametrize("samples", [data(96), Samples()], ids=["data set", "stream"])
def test_batch_norm_accepts_placeholder_batch(samples: Any) -> None:
    """Batch norm rejects a batch of one sample with a single pixel."""

    def program(here: World) -> list[int]:
        model = torch.nn.Sequential(network()[0], torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = sgd(model.double())
        speed = 1.0 if here.rank else 1e6
        loader = hvd.adapt(
            DataLoader(samples, 4), optimizer, min_batch=0, interval=1, timer=Modelled(speed)
        )
        sizes = []
        for batch in loader:
            step_on(model, optimizer, batch, mean_loss)
            sizes.append(loader.num_samples)
        return sizes

    fast, slow = on_ranks(2, program)
    assert fast[0] == slow[0] == 4
    assert fast[-1] == 8
    assert slow[-1] == 0


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Free objects by their reference counts alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("samples", [data(96), Samples()], ids=["data set", "stream"])
def test_optimizer_is_freed_with_its_loader_so_that_next_phase_trains(
    samples: Any, without_gc: None
) -> None:
    """Otherwise the optimizer's hooks would also count the next phase's backward passes."""

    def program(here: World) -> None:
        model = network()

        def train(plain: torch.optim.Optimizer) -> Callable[[], Any]:
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            for batch in hvd.adapt(DataLoader(samples, 4), optimizer):
                step_on(model, optimizer, batch, mean_loss)
            return weakref.ref(optimizer)

        first = torch.optim.SGD(model.parameters(), lr=0.1)
        for plain in (first, first, torch.optim.SGD(model.parameters(), lr=0.01)):
            assert train(plain)() is None

    on_ranks(2, program)


def test_garbage_collected_loop_and_optimizer_raise_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector closes the loop after it has freed the optimizer."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def program(here: World) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loop = iter(hvd.adapt(DataLoader(list(range(16)), 4), optimizer))
        next(loop)
        cycle: list[Any] = [loop, optimizer]
        cycle.append(cycle)
        known = weakref.ref(optimizer)
        del loop, optimizer, cycle
        gc.collect()
        assert known() is None

    on_ranks(1, program)
    assert unraisable == []


def test_set_num_samples_applies_after_break_in_placeholder_batch() -> None:
    def program(here: World) -> tuple[int, int | None]:
        optimizer = some_optimizer()
        loader = hvd.adapt(DataLoader(Indices(5), 2), optimizer)
        for step, _ in enumerate(loader):
            if step == 1:  # of one sample: rank 1 has none
                break
        own = loader.num_samples
        optimizer.set_num_samples(10)
        return own, optimizer._reducer.samples.count

    assert on_ranks(2, program) == [(1, 10), (0, 10)]


def test_rank_that_slows_down_gets_fewer_samples() -> None:
    def program(here: World) -> Any:
        timer = Modelled(100.0)
        loader = hvd.adapt(DataLoader(Indices(10_000), 50), some_optimizer(), timer=timer)
        for step, _ in enumerate(loader):
            if step == 10 and here.rank == 1:
                timer.speed = 25.0
            if step == 90:
                break
        return loader.sizes, [decision.sizes for decision in loader.decisions]

    results = on_ranks(2, program)
    assert results[0] == results[1]
    assert results[0][0] == [80, 20]
    assert len(results[0][1]) <= 2


def test_learning_rate_scales_with_global_batch() -> None:
    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model)
        loader = hvd.adapt(
            DataLoader(data(80), 5), optimizer, lr_scaling="linear", timer=Modelled(1.0)
        )
        rates, totals = [], []
        optimizer.register_step_pre_hook(
            lambda optimizer, *step: rates.append(optimizer.param_groups[0]["lr"])
        )
        for step, batch in enumerate(loader):
            totals.append(sum(loader.sizes))
            step_on(model, optimizer, batch, mean_loss)
            if step == 2:
                loader.set_global_batch(20)
        return totals, rates, optimizer.param_groups[0]["lr"]

    for totals, rates, rate_after in on_ranks(2, program):
        assert totals == [10, 10, 10, 20, 20, 10]
        assert rates == pytest.approx([0.1 * total / 10 for total in totals])
        assert rate_after == 0.1


def test_invalid_or_differing_global_batch_raises_on_every_rank() -> None:
    """Regression: steps without samples never ended, and ranks divided the order differently."""

    def program(here: World) -> None:
        loader = hvd.adapt(DataLoader(Indices(64), 4), some_optimizer())
        for samples in (0, -8):
            with pytest.raises(ValueError, match=f"at least 1 sample, got {samples}"):
                loader.set_global_batch(samples)
        with pytest.raises(TypeError, match=r"a global batch must be a whole number, got 16\.0"):
            loader.set_global_batch(16.0)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1: a global batch of 24 samples"):
            loader.set_global_batch(16 + 8 * here.rank)

    on_ranks(2, program)


def test_resumed_run_keeps_its_own_global_batch_and_rate() -> None:
    def train(here: World, batch_size: int, state: Any, steps: int | None) -> Any:
        model = network()
        optimizer = sgd(model)
        loader = hvd.adapt(
            DataLoader(TensorDataset(torch.arange(240), *data(240).tensors), batch_size),
            optimizer,
            lr_scaling="linear",
            interval=1,
            min_batch=1,
            timer=Modelled(1.0 + 3 * here.rank),
        )
        if state is not None:
            loader.load_state_dict(state)
        rates: list[float] = []
        optimizer.register_step_pre_hook(
            lambda optimizer, *step: rates.append(optimizer.param_groups[0]["lr"])
        )
        seen, sizes, within = [], [], {}
        for indices, *batch in itertools.islice(loader, steps):
            seen += indices.tolist() if loader.num_samples else []
            sizes.append(loader.sizes)
            step_on(model, optimizer, batch, mean_loss)
            within = loader.state_dict()
        return seen, sizes, rates, within

    def program(here: World) -> Any:
        seen, sizes, _, state = train(here, 6, None, 10)
        assert sizes[-1][0] < sizes[-1][1]
        resumed, sizes, rates, _ = train(here, 12, state, None)
        assert sizes[0] == [12, 12]
        assert [sum(each) for each in sizes] == [24] * 5
        assert rates == pytest.approx([0.1] * 5)
        del state["global_batch_given"]  # as in states of earlier versions
        assert sum(train(here, 12, state, 1)[1][0]) == 12
        return seen + resumed

    assert sorted(itertools.chain(*on_ranks(2, program))) == list(range(240))


def test_step_between_epochs_uses_unscaled_rate() -> None:
    """The last batch has 12 samples of 16, and its step has three quarters of the rate."""

    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model)
        rates: list[float] = []
        loader = hvd.adapt(DataLoader(data(60), 16 // here.size), optimizer, lr_scaling="linear")
        optimizer.register_step_pre_hook(
            lambda optimizer, *step: rates.append(optimizer.param_groups[0]["lr"])
        )
        for batch in loader:
            step_on(model, optimizer, batch, mean_loss)
        step_on(model, optimizer, data(4).tensors, mean_loss)
        return rates[-2:]

    assert on_ranks(2, program) == [pytest.approx([0.075, 0.1])] * 2


def test_out_of_memory_bounds_the_batch_of_the_rank() -> None:
    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model)
        loader = hvd.adapt(
            DataLoader(data(600), 20), optimizer, interval=2, timer=Modelled(1.0 + 4 * here.rank)
        )

        def loss_of(batch: Any) -> torch.Tensor:
            if here.rank == 1 and len(batch[0]) > 20:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return mean_loss(model(batch[0]), batch[1])

        sizes = []
        for batch in loader:
            sizes.append(loader.sizes)
            optimizer.zero_grad()
            loader.backward(loss_of, batch)
            optimizer.step()
        return sizes

    for sizes in on_ranks(2, program):
        assert max(own[1] for own in sizes) > 20
        assert sizes[-2][1] <= 20
        assert {sum(each) for each in sizes} == {40}


@pytest.mark.parametrize("min_batch", [0, 8])
def test_batches_never_exceed_max_batch_of_their_rank_with_any_grain(min_batch: int) -> None:
    """Rank 1's max_batch is no multiple of the grain, and below min_batch rounded up to one."""

    def program(here: World) -> Any:
        loader = hvd.adapt(
            DataLoader(Indices(640), 32),
            some_optimizer(),
            grain=5,
            global_batch=60,
            min_batch=min_batch,
            max_batch=7 if here.rank == 1 else None,
            interval=1,
            timer=Modelled(1.0 + here.rank),
        )
        sizes = [loader.sizes for _ in loader][:-1]  # the last is of what is left
        loader.set_global_batch(20)
        return sizes, loader.sizes

    for sizes, after in on_ranks(2, program):
        assert all(each == [55, 5] for each in sizes[-5:])
        assert all(each[1] <= 7 for each in sizes)
        assert sum(after) == 20
        assert after[1] <= 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "mode must be one of balanced"),
        ({"policy": "fast"}, "policy must be one of equal_finish, goodput"),
        ({"lr_scaling": "fast"}, "lr_scaling must be one of none, linear, sqrt, adascale"),
        ({"loss_reduction": "max"}, "loss_reduction must be one of mean, sum"),
        ({"interval": 0}, "interval must be at least 1"),
        ({"min_batch": -1}, "min_batch must be at least 0"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"noise_every": -1}, "noise_every must be at least 0"),
        ({"grain": 3}, "multiple of the grain 3, got 8"),
        ({"grain": 4, "max_batch": 3}, r"max_batch must be at least 4 \(the grain\), got 3"),
        ({"max_batch": 3}, "allow 6 to 6 samples a step, and the global batch is 8"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], text: str) -> None:
    def program(here: World) -> None:
        with pytest.raises(ValueError, match=text):
            hvd.adapt(DataLoader(Indices(10), 4), some_optimizer(), **options)

    on_ranks(2, program)


def test_backward_passes_per_step_above_one_raise_before_and_after_adapt() -> None:
    """Sizes differ from pass to pass, and a step's gradients have one weight."""

    def program(here: World) -> None:
        text = "use backward_passes_per_step=1, got 2; for more samples a step use a larger"
        loader, model = DataLoader(Indices(10), 4), network()
        accumulating = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
        )
        with pytest.raises(ValueError, match=text):
            hvd.adapt(loader, accumulating)
        optimizer = some_optimizer()
        adapted = hvd.adapt(loader, optimizer)
        optimizer.set_backward_passes_per_step(2)
        with pytest.raises(ValueError, match=text):
            next(iter(adapted))

    on_ranks(1, program)


def test_optimizer_of_a_process_set_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def program(here: World) -> None:
        inner, first = torch.optim.SGD(network().parameters(), 0.1), hvd.add_process_set([0])
        optimizer = hvd.DistributedOptimizer(inner, process_set=first)
        with pytest.raises(ValueError, match="takes no process_set"):
            hvd.adapt(DataLoader(Indices(10), 4), optimizer)

    on_ranks(2, program)


def test_unsupported_optimizers_samplers_and_states_raise() -> None:
    def program(here: World) -> None:
        loader, model = DataLoader(Indices(10), 4), network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="the optimizer that DistributedOptimizer returned"):
            hvd.adapt(loader, inner)
        summing = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
        with pytest.raises(ValueError, match="op=Average"):
            hvd.adapt(loader, summing)
        with pytest.raises(ValueError, match="op=Average"):
            summing.set_num_samples(3)
        with pytest.raises(ValueError, match="'mean' or 'sum', got 'max'"):
            some_optimizer().set_num_samples(3, "max")
        with pytest.raises(ValueError, match="batch_size=None"):
            hvd.adapt(DataLoader(Indices(10), batch_size=None), some_optimizer())
        replacing = DataLoader(Indices(10), 2, sampler=RandomSampler(Indices(10), replacement=True))
        with pytest.raises(ValueError, match="cannot read it from a RandomSampler"):
            hvd.adapt(replacing, some_optimizer())
        adapted = hvd.adapt(loader, some_optimizer())
        with pytest.raises(ValueError, match="the state's 'abs'"):
            adapted.load_state_dict({"mode": "abs"})
        shrinking = hvd.adapt(loader, some_optimizer(), order=lambda epoch: range(10 - epoch))
        shrinking.set_epoch(1)
        with pytest.raises(ValueError, match="must hold 10 indices, got 9"):
            list(shrinking)

    on_ranks(1, program)


def test_differing_data_set_lengths_raise() -> None:
    def program(here: World) -> None:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1: 11 samples.*"):
            hvd.adapt(DataLoader(Indices(10 + here.rank), 4), some_optimizer())

    on_ranks(2, program)


def test_iteration_leaves_global_random_state_unchanged() -> None:
    """Otherwise a script would draw other numbers after it resumed an epoch midway."""

    def program(here: World) -> Any:
        loader = hvd.adapt(DataLoader(Indices(8), 2, shuffle=True), some_optimizer())
        before = torch.get_rng_state()
        indices_of(loader)
        return torch.equal(before, torch.get_rng_state()), loader._source._seeds

    ((untouched, numbers),) = on_ranks(1, program)
    assert untouched
    seeds = []
    for epoch in (0, 1, 0):
        numbers.begin(epoch)
        seeds.append(numbers._loader.generator.initial_seed())
    assert seeds[0] == seeds[2] != seeds[1]
