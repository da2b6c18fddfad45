"""All ranks divide the same order of samples: else some are computed twice, and others never."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gtopk.torch as hvd
from gtopk.adaptive.batches.same_stream import order_in_words
from gtopk.world.world import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks

SAMPLES = TensorDataset(torch.ones(16, 2))


def opened(mode: str, loader: DataLoader[Any], order: Any = None) -> tuple[Any, Callable[[], Any]]:
    """Return an adapted loader, and what trains an epoch of it."""
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    options = {"micro_batch": 2} if mode == "abs" else {}
    adapted = hvd.adapt(loader, optimizer, mode, order=order, **options)

    def train() -> None:
        for (x,) in adapted:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    return adapted, train


def seeds_by_rank(mode: str, rank: int) -> None:
    sampler: Any = DistributedSampler(SAMPLES, 2, rank, seed=rank)
    opened(mode, DataLoader(SAMPLES, 2, sampler=sampler))[1]()


def one_rank_shuffles(mode: str, rank: int) -> None:
    opened(mode, DataLoader(SAMPLES, 2, shuffle=rank == 0))[1]()


def orders_by_rank(mode: str, rank: int) -> None:
    shifted = [*range(rank, 16), *range(rank)]
    opened(mode, DataLoader(SAMPLES, 2), lambda epoch: shifted)[1]()


def one_rank_sets_the_epoch(mode: str, rank: int) -> None:
    loader, train = opened(mode, DataLoader(SAMPLES, 2, shuffle=True))
    loader.set_epoch(rank)
    train()


def one_rank_loads_a_state(mode: str, rank: int) -> None:
    loader, train = opened(mode, DataLoader(SAMPLES, 2))
    state = loader.state_dict()
    train()
    if rank == 0:
        loader.load_state_dict(state)
    train()


def one_rank_looks_at_a_batch(mode: str, rank: int) -> None:
    loader, train = opened(mode, DataLoader(SAMPLES, 2))
    if rank == 0:
        next(iter(loader))
    train()


@pytest.mark.parametrize("mode", ["balanced", "abs"])
@pytest.mark.parametrize(
    "mistake",
    [
        seeds_by_rank,
        one_rank_shuffles,
        orders_by_rank,
        one_rank_sets_the_epoch,
        one_rank_loads_a_state,
        one_rank_looks_at_a_batch,
    ],
)
def test_ranks_that_begin_unlike_iterations_are_an_error_on_all(
    mode: str, mistake: Callable[[str, int], None]
) -> None:
    def program(here: World) -> str:
        with pytest.raises(hvd.HorovodInternalError) as raised:
            mistake(mode, here.rank)
        return str(raised.value)

    first, other = on_ranks(2, program)
    assert first == other
    assert "the ranks disagree about" in first


def test_an_order_is_told_by_its_indices_of_whatever_kind() -> None:
    words = {order_in_words(order) for order in ([0, 1, 2], (0, 1, 2), torch.arange(3))}
    assert len(words) == 1
    names = [f"sample {i}" for i in range(3)]
    assert order_in_words(names) == order_in_words(list(names))
    others: Iterator[Any] = iter(([0, 2, 1], [0, 1], names, names[::-1], [(0, 1), (1, 2)]))
    assert len({*words, *map(order_in_words, others)}) == 6
    assert order_in_words(range(10**15)) == "range(0, 1000000000000000)"  # not a word of each
