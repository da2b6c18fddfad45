"""What holds of adapt in several modes, and balanced batches on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
from gtopk.world.state import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks, some_optimizer
from tests.gtopk.adaptive.sums_of_samples import data

MODES = ["balanced", "abs", "adaptive-sgd", "hogbatch"]


def test_real_ranks_with_workers_see_every_sample_once(mpirun: Callable[..., Any]) -> None:
    job = mpirun(3, "adapts.py")
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("mode", ["balanced", "abs", "adaptive-sgd"])
def test_the_epoch_that_is_set_after_a_break_is_trained_with_whole(mode: str, epoch: int) -> None:
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


@pytest.mark.parametrize("mode", ["abs", "adaptive-sgd", "hogbatch"])
def test_a_layer_that_is_thawed_after_adapt_is_an_error_of_the_next_epoch(mode: str) -> None:
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
def test_a_mode_that_exchanges_no_gradients_in_backward_cannot_hide_behind_it(mode: str) -> None:
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
def test_a_stream_has_no_indices_to_hand_out(mode: str, stream: Any, order: Any) -> None:
    def program(here: World) -> None:
        text = f"mode '{mode}' .* needs a data set of a length that is no IterableDataset, got Str"
        with pytest.raises(ValueError, match=text):
            hvd.adapt(DataLoader(stream, 4), some_optimizer(), mode, order=order)

    on_ranks(1, program)


@pytest.mark.parametrize("mode", MODES)
def test_batches_that_a_loader_draws_by_itself_are_not_passed_over(mode: str) -> None:
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
def test_a_sampler_that_draws_in_its_own_way_is_not_taken_for_its_base_class(mode: str) -> None:
    def program(here: World) -> None:
        inner = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner)
        for own in (Weighted(range(64), 2, 0), Reversed(range(64))):
            loader = DataLoader(data(64), 8, sampler=own)
            with pytest.raises(ValueError, match=f"cannot tell it from a {type(own).__name__}; "):
                hvd.adapt(loader, optimizer, mode)
        same = DataLoader(data(64), 8, sampler=Named(range(64), 2, 0, shuffle=False))
        adapted = hvd.adapt(same, optimizer, mode)
        assert [i for indices, _ in adapted for i in indices.tolist()] == list(range(64))

    on_ranks(1, program)


@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_of_a_part_of_the_samples_is_not_taken_for_all(mode: str) -> None:
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
