"""All ranks must divide the same order of samples, or some come twice and others never."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gtopk.torch as hvd
from collectives import MismatchError, PeerError
from gtopk.adaptive.sources import describe_order
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks

SAMPLES = TensorDataset(torch.ones(16, 2))
OPTIONS: dict[str, dict[str, Any]] = {"abs": {"micro_batch": 2}}


def opened(mode: str, loader: DataLoader[Any], order: Any = None) -> tuple[Any, Callable[[], Any]]:
    """Return an adapted loader, and a function that trains an epoch."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)  # the same on all ranks
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    adapted = hvd.adapt(loader, optimizer, mode, order=order, **OPTIONS.get(mode, {}))

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


MISTAKES = [
    seeds_by_rank,
    one_rank_shuffles,
    orders_by_rank,
    one_rank_sets_the_epoch,
    one_rank_loads_a_state,
]


@pytest.mark.parametrize(
    ("mode", "mistake"),
    [
        *itertools.product(["balanced", "abs", "adaptive-sgd"], MISTAKES),
        # Not "adaptive-sgd": others may have finished the epoch that one rank aborts.
        *itertools.product(["balanced", "abs"], [one_rank_looks_at_a_batch]),
    ],
)
def test_differing_iterations_raise_on_all_ranks(
    mode: str, mistake: Callable[[str, int], None]
) -> None:
    def program(here: World) -> str:
        with pytest.raises(hvd.HorovodInternalError) as raised:
            mistake(mode, here.rank)
        return str(raised.value).partition("; at step")[0]  # ranks take different numbers of steps

    first, other = on_ranks(2, program)
    assert first == other
    assert "the ranks disagree about" in first


@pytest.mark.parametrize(
    "mistake", [seeds_by_rank, one_rank_shuffles, orders_by_rank, one_rank_sets_the_epoch]
)
def test_differing_epochs_of_workers_on_one_node_raise_on_all_workers(
    mistake: Callable[[str, int], None],
) -> None:
    def program(here: World) -> str:
        with pytest.raises(MismatchError) as raised:
            mistake("hogbatch", here.rank)
        here.transport.leave("in a test")
        return str(raised.value)

    order = r"(an order of 16 samples of checksum \w{8}|range\(0, 16\))"
    sides = f"epoch [01], {order} and epoch [01], {order} at the same time"
    for rank, error in enumerate(on_ranks(2, program)):
        assert re.match(f"rank {rank}: the ranks of this host have begun {sides}", error)


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1], [2, 3]]])
def test_differing_epochs_of_nodes_raise_on_all_ranks(
    nodes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's first worker detects it before a batch, the others at the next; nobody leaves."""
    have_raised = threading.Barrier(sum(map(len, nodes)))
    monkeypatch.setitem(OPTIONS, "hogbatch", {"nodes": nodes})

    def program(here: World) -> tuple[Exception, int]:
        node = next(number for number, ranks in enumerate(nodes) if here.rank in ranks)
        loader, train = opened("hogbatch", DataLoader(SAMPLES, 2, shuffle=True))
        loader.set_epoch(node)
        with pytest.raises((PeerError, hvd.HorovodInternalError)) as raised:
            train()
        have_raised.wait()
        return raised.value, loader._table["updates"]

    results = on_ranks(sum(map(len, nodes)), program)
    for ranks in nodes:
        first, *others = (results[rank] for rank in ranks)
        assert "the ranks disagree about" in str(first[0])
        assert "epoch 1, an order of 16 samples" in str(first[0])
        assert first[1] == 0
        for error, _ in others:
            assert f"rank {ranks[0]}, which merges models between nodes, got" in str(error)
            assert "the ranks disagree about" in str(error)


def one_rank_evaluates_others(mode: str, rank: int) -> None:
    loader, _ = opened(mode, DataLoader(SAMPLES, 2))
    loader.evaluate(lambda batch: batch[0].mean(), batch=4 if rank else 8)


def one_rank_trains_meanwhile(mode: str, rank: int) -> None:
    loader, train = opened(mode, DataLoader(SAMPLES, 2))
    if rank:
        train()
    else:
        loader.evaluate(lambda batch: batch[0].mean(), batch=4)


@pytest.mark.parametrize("may_leave", [False, True])
@pytest.mark.parametrize("mistake", [one_rank_evaluates_others, one_rank_trains_meanwhile])
def test_differing_evaluations_raise_on_all_workers(
    may_leave: bool, mistake: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if ranks may leave, no loss is returned: the first to begin may be the wrong one."""
    monkeypatch.setitem(OPTIONS, "hogbatch", {"ranks_may_leave": may_leave})

    def program(here: World) -> str:
        with pytest.raises(MismatchError) as raised:
            mistake("hogbatch", here.rank)
        return str(raised.value)

    for error in on_ranks(2, program):
        assert "an evaluation of 16 samples, 4 at a time" in error


def test_order_description_depends_only_on_its_indices() -> None:
    words = {describe_order(order) for order in ([0, 1, 2], (0, 1, 2), torch.arange(3))}
    assert len(words) == 1
    names = [f"sample {i}" for i in range(3)]
    assert describe_order(names) == describe_order(list(names))
    others: Iterator[Any] = iter(([0, 2, 1], [0, 1], names, names[::-1], [(0, 1), (1, 2)]))
    assert len({*words, *map(describe_order, others)}) == 6
    assert describe_order(range(10**15)) == "range(0, 1000000000000000)"  # not every element
