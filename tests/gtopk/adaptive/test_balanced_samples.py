"""Mode "balanced" hands out each sample once per epoch, wherever it resumes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.indices import Indices, indices_of
from tests.gtopk.adaptive.modelled_ranks import Modelled, on_ranks, some_optimizer


@pytest.mark.parametrize("size", [1, 2, 5])
def test_epoch_covers_every_sample_once(size: int) -> None:
    def program(here: World) -> Any:
        loader = hvd.adapt(
            DataLoader(Indices(103), 4, shuffle=True),
            some_optimizer(),
            interval=1,
            min_batch=0,
            timer=Modelled(1.0 + here.rank),
        )
        return [indices_of(loader) for _ in range(4)], len(loader), loader.decisions

    results = on_ranks(size, program)
    for epoch in range(4):
        seen = [index for result in results for batch in result[0][epoch] for index in batch]
        assert sorted(seen) == list(range(103))
    assert all(result[1:] == results[0][1:] for result in results)
    assert results[0][1] == -(-103 // (4 * size)) == len(results[0][0][0])


def test_order_follows_epoch_set_on_the_sampler() -> None:
    def program(here: World) -> Any:
        sampler = DistributedSampler(Indices(12), here.size, here.rank, seed=5)
        loader = hvd.adapt(DataLoader(Indices(12), 3, sampler=sampler), some_optimizer())
        orders = []
        for epoch in (0, 1, 1, 7):
            sampler.set_epoch(epoch)
            orders.append(indices_of(loader))
        loader.set_epoch(7)
        orders.append(indices_of(loader))
        return orders

    ranks = on_ranks(2, program)
    epochs = [
        [a + b for a, b in zip(*batches, strict=True)] for batches in zip(*ranks, strict=True)
    ]
    expected = [
        torch.randperm(12, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        for epoch in (0, 1, 2, 7, 7)  # without set_epoch, the epoch increments
    ]
    assert [list(itertools.chain(*epoch)) for epoch in epochs] == expected


def test_break_ends_the_epoch() -> None:
    def program(here: World) -> Any:
        loader = hvd.adapt(DataLoader(Indices(16), 2), some_optimizer(), min_batch=0)
        for _ in loader:
            break
        return indices_of(loader), loader.step

    for batches, step in on_ranks(2, program):
        assert len(batches) == 4
        assert step == 5


def test_resumed_run_skips_epoch_that_ended_by_break() -> None:
    def open_loader() -> Any:
        return hvd.adapt(DataLoader(Indices(24), 2, shuffle=True), some_optimizer())

    def run_two_steps(loader: Any) -> Any:
        seen, within = [], None
        for step, batch in enumerate(loader):
            seen.append(batch.tolist())
            if step == 1:
                within = json.loads(json.dumps(loader.state_dict()))
                break
        return seen, within

    def program(here: World) -> None:
        loader = open_loader()
        run_two_steps(loader)
        before, within = run_two_steps(loader)
        after = json.loads(json.dumps(loader.state_dict()))
        next_epoch = indices_of(loader)
        resumed = open_loader()
        resumed.load_state_dict(after)
        assert indices_of(resumed) == next_epoch
        resumed.load_state_dict(within)  # saved before the break
        left = indices_of(resumed)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
        own_batches = [order[i : i + 2] for i in range(2 * here.rank, 24, 2 * here.size)]
        assert before + left == own_batches

    on_ranks(2, program)


def test_state_loaded_within_iteration_discards_current_batch() -> None:
    def program(here: World) -> None:
        loader = hvd.adapt(DataLoader(Indices(16), 2), some_optimizer())
        for step, _ in enumerate(loader):
            if step == 1:
                state = loader.state_dict()
            if step == 2:
                loader.load_state_dict(state)
                break
        assert loader.state_dict() == state
        batches = iter(loader)
        next(batches)
        assert loader.step == state["step"]

    on_ranks(2, program)


@pytest.mark.parametrize("left_after", [0, 3, 7, 11])
@pytest.mark.parametrize("resumed_on", [3, 2])
def test_epoch_resumes_midway(left_after: int, resumed_on: int) -> None:
    def open_loader(here: World) -> Any:
        return hvd.adapt(
            DataLoader(Indices(100), 12 // here.size, shuffle=True),
            some_optimizer(),
            interval=1,
            min_batch=0,
            timer=Modelled(1.0 + here.rank),
        )

    def run(here: World) -> Any:
        loader, batches = open_loader(here), []
        state = before = loader.state_dict()
        for batch in itertools.chain.from_iterable(iter(loader) for _ in range(2)):
            if len(batches) == left_after:
                state = before
            batches.append(batch.tolist() if loader.num_samples else [])
            before = loader.state_dict()
        return batches, json.loads(json.dumps(state))

    results = on_ranks(3, run)
    states = [state for _, state in results]
    assert all(state == states[0] for state in states)

    def resume(here: World) -> Any:
        loader = open_loader(here)
        loader.load_state_dict(states[0])
        first = indices_of(loader)
        return first, loader.sizes

    resumed = on_ranks(resumed_on, resume)
    steps = len(results[0][0]) // 2
    rest = range(left_after % steps, steps)
    offset = left_after // steps * steps
    expected = [index for result in results for step in rest for index in result[0][offset + step]]
    found = [index for batches, _ in resumed for batch in batches for index in batch]
    assert sorted(found) == sorted(expected)
    if resumed_on == 3:  # to the batch
        for (batches, _), (before, _) in zip(resumed, results, strict=True):
            assert batches == before[offset + left_after % steps : offset + steps]


def test_resumed_run_keeps_its_own_batch_bounds() -> None:
    def open_loader(here: World, most: int | None) -> Any:
        return hvd.adapt(
            DataLoader(Indices(400), 8, shuffle=True),
            some_optimizer(),
            max_batch=most if here.rank == 1 else None,
            interval=1,
            min_batch=0,
            timer=Modelled(1.0 + 3 * here.rank),
        )

    def save(here: World) -> Any:
        loader = open_loader(here, None)
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(12)]
        return seen, loader.sizes, json.loads(json.dumps(loader.state_dict()))

    saved = on_ranks(2, save)
    assert saved[0][1] == [3, 13]

    def resume(here: World) -> Any:
        loader = open_loader(here, 9)
        loader.load_state_dict(saved[here.rank][2])
        sizes, seen = [loader.sizes], []
        for batch in loader:
            seen += batch.tolist()
            sizes.append(loader.sizes)
        return seen, sizes, loader._controller.sizes

    resumed = on_ranks(2, resume)
    for _, sizes, decided in resumed:
        assert sizes[:-1] == [[7, 9]] * len(sizes[:-1])
        assert decided == [7, 9]
    seen = [i for rank in (0, 1) for b in saved[rank][0] for i in b] + resumed[0][0] + resumed[1][0]
    assert sorted(seen) == list(range(400))

    def refuse(here: World) -> None:
        loader = hvd.adapt(DataLoader(Indices(400), 4), some_optimizer(), min_batch=0)
        loader.set_global_batch(16)
        state = loader.state_dict()
        small = hvd.adapt(DataLoader(Indices(400), 4), some_optimizer(), max_batch=5, min_batch=0)
        with pytest.raises(ValueError, match="allow 0 to 10 samples a step, and the global batch"):
            small.load_state_dict(state)
        assert small.state_dict()["epochs"]["start"] == 0

    on_ranks(2, refuse)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(50))


@pytest.mark.parametrize("drop_last", [False, True])
def test_stream_is_divided_over_ranks(drop_last: bool) -> None:
    def program(here: World) -> Any:
        loader = hvd.adapt(
            DataLoader(Stream(), 4, drop_last=drop_last),
            some_optimizer(),
            interval=1,
            min_batch=0,
            timer=Modelled(1.0),
        )
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        first = indices_of(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = [loader.num_samples and batch.tolist() for batch in iterator]
        loader.load_state_dict(state)
        again = indices_of(loader)
        return first, rest == [batch or 0 for batch in again]

    results = on_ranks(3, program)
    assert all(same for _, same in results)
    seen = sorted(index for batches, _ in results for batch in batches for index in batch)
    assert seen == list(range(48 if drop_last else 50))


def test_order_function_replaces_unsupported_sampler() -> None:
    def program(here: World) -> Any:
        sampler = WeightedRandomSampler([1.0] * 10, 10)
        loader = DataLoader(Indices(10), 2, sampler=sampler)
        with pytest.raises(ValueError, match="cannot read it from a WeightedRandomSampler"):
            hvd.adapt(loader, some_optimizer())
        adapted = hvd.adapt(loader, some_optimizer(), order=lambda epoch: [epoch] * 7)
        return indices_of(adapted) + indices_of(adapted)

    first, second = on_ranks(2, program)
    assert sum(map(len, first)) + sum(map(len, second)) == 14
    assert first[0] == [0, 0]
    assert first[-2] == [1, 1]


def test_sizes_are_decided_once_per_window_if_every_step_is_partial() -> None:
    """With a data set smaller than the global batch."""

    def program(here: World) -> list[int]:
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
        )
        data = DataLoader(TensorDataset(torch.ones(40, 3)), 32)
        loader = hvd.adapt(data, optimizer, interval=5)
        decide, decided_at = loader._decide, []

        def noted_decide() -> None:
            decided_at.append(loader.step)
            decide()

        loader._decide = noted_decide
        for _ in range(40):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return decided_at

    for decided_at in on_ranks(2, program):
        assert len(decided_at) > 3
        assert min(b - a for a, b in itertools.pairwise(decided_at)) >= 5
