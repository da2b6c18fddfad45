"""Adaptive batches on real ranks: DataLoader workers, the real clock, epochs resumed."""

from __future__ import annotations

from itertools import chain

import light_torch  # noqa: F401

import torch
from checks import run_tests, same_bits_everywhere, same_everywhere
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import gtopk.torch as hvd

LENGTH, TOGETHER = 211, 24


class Indexed(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((6,), index / LENGTH)


class Stream(IterableDataset[int]):
    """Worker i of n yields i, i + n, ...: a stream whose order depends on its workers only."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id, LENGTH, worker.num_workers) if worker else range(LENGTH))


def of_all_ranks(seen: list[int]) -> list[int]:
    return sorted(chain.from_iterable(hvd.allgather_object(seen)))


def train(loader, model, optimizer) -> list[int]:
    seen = []
    for indices, x in loader:
        seen += indices.tolist() if loader.num_samples else []
        optimizer.zero_grad()
        # Repeated, so that ranks differ in speed.
        for _ in range(1 + 3 * hvd.rank()):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return seen


def distributed():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.3),
    )
    return model, optimizer


def adapted(dataset, **options):
    model, optimizer = distributed()
    loader = hvd.adapt(
        DataLoader(dataset, TOGETHER // hvd.size(), **options), optimizer, interval=2, min_batch=1
    )
    return loader, model, optimizer


def test_persistent_workers_load_every_sample_each_epoch() -> None:
    loader, model, optimizer = adapted(
        Indexed(), shuffle=True, num_workers=2, prefetch_factor=2 + hvd.rank(),
        persistent_workers=True,
    )  # fmt: skip
    orders = []
    for _ in range(3):
        orders.append(train(loader, model, optimizer))
        assert of_all_ranks(orders[-1]) == list(range(LENGTH))
        assert len(loader) == -(-LENGTH // TOGETHER)
    assert orders[0] != orders[1]
    assert same_everywhere(str(loader.decisions))
    assert same_bits_everywhere(torch.cat([p.reshape(-1) for p in model.parameters()]))


def test_adaptive_epoch_resumes_from_state_with_workers() -> None:
    options = {"shuffle": True, "num_workers": 1}
    loader, _, _ = adapted(Indexed(), **options)
    seen = []
    for step, (indices, _) in enumerate(loader):
        seen += indices.tolist()
        if step == 4:
            state = loader.state_dict()
            break
    assert same_everywhere(str(state))
    loader, model, optimizer = adapted(Indexed(), **options)
    loader.load_state_dict(state)
    seen += train(loader, model, optimizer)
    assert of_all_ranks(seen) == list(range(LENGTH))


def test_iterable_dataset_is_read_once_by_workers() -> None:
    loader, _, _ = adapted(Stream(), num_workers=2)
    seen = [index for batch in loader if loader.num_samples for index in batch.tolist()]
    assert of_all_ranks(seen) == list(range(LENGTH))


def test_adaptive_sgd_replicas_share_each_epoch_and_merge() -> None:
    model, optimizer = distributed()
    loader = hvd.adapt(
        DataLoader(Indexed(), 8, shuffle=True, num_workers=1, persistent_workers=True),
        optimizer,
        "adaptive-sgd",
        mega_batch=70,
        min_batch=1,
    )
    for _ in range(3):
        assert of_all_ranks(train(loader, model, optimizer)) == list(range(LENGTH))
        assert same_everywhere(str(loader.last_merge))
        with loader.merged():
            assert same_bits_everywhere(torch.cat([p.reshape(-1) for p in model.parameters()]))
    assert loader.merges == 9
    loader.drain()
    assert same_bits_everywhere(torch.cat([p.reshape(-1) for p in model.parameters()]))


def test_abs_epoch_resumes_after_a_round() -> None:
    def rounds():
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            hvd.Compression.gtopk(density=0.3),
        )
        loader = hvd.adapt(
            DataLoader(Indexed(), 4, shuffle=True, num_workers=1), optimizer, "abs", micro_batch=2
        )
        return loader, model, optimizer

    loader, model, optimizer = rounds()
    seen = []
    for indices, x in loader:
        seen += indices.tolist() if loader.num_samples else []
        for _ in range(1 + 3 * hvd.rank()):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if loader.round >= 1:
            loader.drain()
            state, weights = loader.state_dict(), model.state_dict()
            break
    assert same_everywhere(str({**state, "residual": None}))
    loader, model, optimizer = rounds()
    model.load_state_dict(weights)
    loader.load_state_dict(state)
    seen += train(loader, model, optimizer)
    assert of_all_ranks(seen) == list(range(LENGTH))
    assert same_bits_everywhere(torch.cat([p.reshape(-1) for p in model.parameters()]))


hvd.init()
torch.set_num_threads(1)
run_tests(globals())
hvd.shutdown()
