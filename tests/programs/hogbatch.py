"""Hogbatch on real ranks: one model in shared memory, with real races and clocks."""

from __future__ import annotations

from itertools import chain

import light_torch  # noqa: F401

import torch
from checks import run_tests, same_bits_everywhere, same_everywhere, weights
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd

LENGTH = 211


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(LENGTH), x, torch.sin(x.sum(1, keepdim=True)))


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).double()


def adapted(mode: str, workers: int = 0, **options):
    model = network(hvd.rank())  # rank 0's counts
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model.named_parameters()
    )
    prefetching = {"num_workers": workers, "persistent_workers": True} if workers else {}
    loader = hvd.adapt(
        DataLoader(samples(), 16, shuffle=True, **prefetching),
        optimizer,
        mode,
        device_class="slow" if hvd.rank() % 2 else "fast",
        sizes={"slow": (2, 8), "fast": (4, 16)},
        **options,
    )
    return loader, model, optimizer


def train(loader, model, optimizer) -> list[list[int]]:
    batches = []
    for indices, x, y in loader:
        batches.append(indices.tolist())
        optimizer.zero_grad()
        for _ in range(1 + 3 * (hvd.rank() % 2)):  # repeated, so that workers differ in speed
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return batches


def of_all_ranks(batches: list[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(chain.from_iterable(hvd.allgather_object(batches))))


def test_workers_train_one_model_and_see_every_sample_once() -> None:
    for mode, workers in (("hogbatch", 0), ("adaptive-hogbatch", 2)):
        loader, model, optimizer = adapted(mode, workers, audit=True)
        for _ in range(3):
            assert of_all_ranks(train(loader, model, optimizer)) == list(range(LENGTH))
        report = loader.report()
        assert sum(worker.samples for worker in report.workers) == 3 * LENGTH
        assert all(worker.is_present for worker in report.workers)
        lost = loader.audited()
        assert 0 <= lost <= report.overlapped_share + 1e-12
        loader.drain()
        assert same_bits_everywhere(weights(model))
        assert not torch.equal(weights(model), weights(network(0)))
        hvd.barrier()


def test_lock_step_hogbatch_equals_one_process() -> None:
    loader, model, optimizer = adapted("hogbatch", lock_step=True)
    batches = hvd.allgather_object(train(loader, model, optimizer))
    loader.drain()
    plain = network(0)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    turns = [batch for turn in zip(*pad(batches), strict=True) for batch in turn if batch]
    assert sorted(chain.from_iterable(turns)) == list(range(LENGTH))
    for batch in turns:
        _, x, y = samples()[batch]
        oracle.param_groups[0]["lr"] = 0.1 * len(batch) / (16 * hvd.size())
        oracle.zero_grad()
        (plain(x) - y).square().mean().backward()
        oracle.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-11, atol=1e-13)


def pad(batches: list[list[list[int]]]) -> list[list[list[int]]]:
    """Return every worker's batches, padded to the same number."""
    most = max(map(len, batches))
    return [each + [[]] * (most - len(each)) for each in batches]


def test_loss_is_evaluated_by_all_workers_together() -> None:
    loader, model, optimizer = adapted("hogbatch")
    train(loader, model, optimizer)

    def mean_loss(batch) -> torch.Tensor:
        return (model(batch[1]) - batch[2]).square().mean()

    loss = loader.evaluate(mean_loss, batch=50)
    loader.drain()
    assert abs(loss - mean_loss(samples()[:]).item()) < 1e-12
    assert same_everywhere(str(loss))


def test_two_nodes_merge_their_models_while_training() -> None:
    half = hvd.size() // 2
    if not half:
        return
    nodes = [list(range(half)), list(range(half, hvd.size()))]
    loader, model, optimizer = adapted("hogbatch", nodes=nodes)
    for _ in range(2):
        assert of_all_ranks(train(loader, model, optimizer)) == list(range(LENGTH))
    loader.drain()
    rows = hvd.allgather(weights(model).reshape(1, -1))
    torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=1e-12, atol=1e-14)
    hvd.barrier()


hvd.init()
torch.set_num_threads(1)
run_tests(globals())
hvd.shutdown()
