"""Tests of adapt in several modes, and of balanced batches on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks, some_optimizer
from tests.gtopk.adaptive.sums_of_samples import data

MODES = ["balanced", "abs", "adaptive-sgd", "hogbatch"]


def test_mpi_ranks_with_data_workers_see_every_sample_once(mpirun: Callable[..., Any]) -> None:
    job = mpirun(3, "adapts.py")
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("mode", ["balanced", "abs", "adaptive-sgd"])
def test_epoch_set_after_break_is_trained_from_its_beginning(mode: str, epoch: int) -> None:
    def program(here: World) -> None:
        model = torch.nn.Linear(3, 1).double()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        loader = hvd.adapt(DataLoader(data(32), 4, shuffle=True), optimizer, mode)

        def train() -> Iterator[int]:
            for indices, x in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                yield from indices.tolist()

        next(train())
        loader.set_epoch(epoch)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert list(train()) == order
        assert loader.state_dict()["epochs"] == {"epoch": epoch + 1, "start": 0}

    on_ranks(1, program)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("within", ["looks at a batch", "begins and goes on", "loads a state"])
@pytest.mark.parametrize("mode", MODES)
def test_loop_raises_after_another_loop_begins_or_state_is_loaded(
    mode: str, within: str, size: int
) -> None:
    """Regression: it continued at the second loop's position; samples came twice or never."""

    def program(here: World) -> list[int]:
        model = torch.nn.Linear(3, 1).double()
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        loader = hvd.adapt(DataLoader(data(64), 4, shuffle=True), optimizer, mode)
        state, kept = loader.state_dict(), []

        def train(meanwhile: Callable[[], Any] = lambda: None) -> Iterator[int]:
            for indices, x in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                if loader.num_samples:
                    yield from indices.tolist()
                meanwhile()

        def disturb() -> None:
            if within == "loads a state":
                loader.load_state_dict(state)
                for parameter in model.parameters():
                    torch.nn.init.zeros_(parameter)
                return
            kept.append(iter(loader))
            next(kept[-1])
            if within == "looks at a batch":
                kept.clear()

        with pytest.raises(RuntimeError, match=f"rank {here.rank}: this loop .* cannot continue"):
            list(train(disturb))
        return list(train())

    seen = on_ranks(size, program)
    assert sorted(index for own in seen for index in own) == list(range(64))


@pytest.mark.parametrize("mode", MODES)
def test_epoch_without_samples_ends_immediately(mode: str) -> None:
    def program(here: World) -> None:
        loader = hvd.adapt(DataLoader(data(0), 4), some_optimizer(), mode)
        for _ in range(2):
            assert list(loader) == []
        loader.drain()
        assert len(loader) == 0
        assert loader.state_dict()["epochs"] == {"epoch": 2, "start": 0}
        if mode == "hogbatch":
            assert loader.evaluate(lambda batch: batch[1].mean(), dataset=data(9)) == pytest.approx(
                float(data(9).tensors[1].mean())
            )

    on_ranks(2, program)


INTEGER_OPTIONS = {
    "balanced": ["global_batch", "min_batch", "max_batch", "interval", "seed"],
    "abs": ["micro_batch"],
    "adaptive-sgd": ["mega_batch", "local_steps", "max_batch"],
    "hogbatch": ["merge_every", "min_batch"],
}


@pytest.mark.parametrize(
    ("mode", "name"), [(m, n) for m, names in INTEGER_OPTIONS.items() for n in names]
)
def test_count_options_accept_only_integers_of_any_library(mode: str, name: str) -> None:
    """Regression: floats were accepted until a batch was cut; NumPy's integers were not."""

    def program(here: World) -> None:
        for wrong in (8.0, 8.5, "8"):
            with pytest.raises(TypeError, match=f"{name} must be a whole number, got {wrong!r}"):
                hvd.adapt(DataLoader(data(64), 8), some_optimizer(), mode, **{name: wrong})
        own: Any = np.int64(8) if here.rank else 8
        loader = hvd.adapt(DataLoader(data(64), 8), some_optimizer(), mode, **{name: own})
        assert type(getattr(loader._options, name)) is int

    on_ranks(2, program)


@pytest.mark.parametrize("mode", MODES[1:])
def test_adam_state_of_steps_before_exchange_raises_in_modes_with_own_step(mode: str) -> None:
    """Regression: the mode's first step raised KeyError: 'exp_avg'."""

    def opened() -> Any:
        layer = torch.nn.Linear(3, 1).double()
        return layer, hvd.DistributedOptimizer(
            torch.optim.AdamW(layer.parameters(), lr=0.1),
            layer.named_parameters(),
            hvd.Compression.gtopk(density=0.5),
        )

    def program(here: World) -> None:
        layer, optimizer = opened()
        layer(torch.ones(2, 3).double()).sum().backward()
        optimizer.step()
        text = f"rank {here.rank}: the optimizer's state was saved with adam_steps='before'"
        with pytest.raises(ValueError, match=text):
            hvd.adapt(DataLoader(data(64), 4), optimizer, mode)
        _, other = opened()
        hvd.adapt(DataLoader(data(64), 4), other, mode)
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(optimizer.state_dict())

    on_ranks(2, program)


def test_adapt_rejects_loader_that_is_not_a_dataloader() -> None:
    def program(here: World) -> None:
        optimizer = some_optimizer()
        adapted = hvd.adapt(DataLoader(data(64), 8), optimizer)
        for loader, name in (([1, 2], "list"), (adapted, "BalancedLoader")):
            with pytest.raises(TypeError, match=f"needs a torch.*DataLoader, got {name}; to adapt"):
                hvd.adapt(loader, optimizer)

    on_ranks(1, program)


@pytest.mark.parametrize("mode", ["abs", "adaptive-sgd", "hogbatch"])
def test_layer_thawed_after_adapt_raises_in_the_next_epoch(mode: str) -> None:
    def program(here: World) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        loader = hvd.adapt(DataLoader(data(16), 4), optimizer, mode)
        for _, x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"others do, too: number 0 of group 0, \[2, 3\]"):
            next(iter(loader))

    on_ranks(1, program)


@pytest.mark.parametrize("mode", ["abs", "adaptive-sgd", "hogbatch"])
def test_hide_behind_backward_raises_in_modes_without_exchange_in_backward(mode: str) -> None:
    def program(here: World) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1),
            compression=hvd.Compression.auto(hide_behind_backward=True),
        )
        with pytest.raises(ValueError, match=f"not for mode '{mode}'.* give density="):
            hvd.adapt(DataLoader(data(16), 4), optimizer, mode)

    on_ranks(1, program)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


class StreamOfLength(Stream):
    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize("order", [None, lambda epoch: range(16)])
@pytest.mark.parametrize("stream", [Stream(), StreamOfLength()])
@pytest.mark.parametrize("mode", MODES[1:])
def test_stream_without_indices_raises(mode: str, stream: Any, order: Any) -> None:
    def program(here: World) -> None:
        text = f"mode '{mode}' .* needs a data set with a length, not an IterableDataset, got Str"
        with pytest.raises(ValueError, match=text):
            hvd.adapt(DataLoader(stream, 4), some_optimizer(), mode, order=order)

    on_ranks(1, program)


@pytest.mark.parametrize("mode", MODES)
def test_dataloader_without_batch_size_raises(mode: str) -> None:
    def program(here: World) -> None:
        own = BatchSampler(SequentialSampler(range(64)), 8, drop_last=False)
        for loader in (DataLoader(data(64), batch_sampler=own), DataLoader(data(64), None)):
            with pytest.raises(ValueError, match="needs a DataLoader with a batch_size, got one"):
                hvd.adapt(loader, some_optimizer(), mode)

    on_ranks(1, program)


class Weighted(DistributedSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([self.rank] * 32)


class Reversed(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(63, -1, -1))


class Named(DistributedSampler[int]):
    pass


@pytest.mark.parametrize("mode", MODES)
def test_sampler_subclass_with_its_own_order_raises(mode: str) -> None:
    def program(here: World) -> None:
        inner = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner)
        for own in (Weighted(range(64), 2, 0), Reversed(range(64))):
            loader = DataLoader(data(64), 8, sampler=own)
            with pytest.raises(ValueError, match=f"cannot read it from a {type(own).__name__}; "):
                hvd.adapt(loader, optimizer, mode)
        same = DataLoader(data(64), 8, sampler=Named(range(64), 2, 0, shuffle=False))
        adapted = hvd.adapt(same, optimizer, mode)
        assert [i for indices, _ in adapted for i in indices.tolist()] == list(range(64))

    on_ranks(1, program)


@pytest.mark.parametrize("mode", MODES)
def test_sampler_of_only_some_samples_raises(mode: str) -> None:
    def program(here: World) -> None:
        samples = data(64)
        inner = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner)
        for sampler, name in (
            (RandomSampler(samples, num_samples=16), "RandomSampler"),
            (SequentialSampler(range(16)), "SequentialSampler"),
        ):
            loader = DataLoader(samples, 8, sampler=sampler)
            with pytest.raises(ValueError, match=f"each of the 64 samples .* {name} draws 16;"):
                hvd.adapt(loader, optimizer, mode)

    on_ranks(1, program)
