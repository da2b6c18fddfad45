"""Hogbatch on real ranks, of which the first HOGBATCH_GPUS ranks use the first GPU."""

from __future__ import annotations

import faulthandler
import os
from itertools import chain

import light_torch  # noqa: F401

import torch
from checks import run_tests, same_bits_everywhere
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd

LENGTH = 211
faulthandler.dump_traceback_later(30)  # prints where a rank hangs


def test_gpu_and_cpu_workers_train_one_model_and_see_every_sample_once() -> None:
    on_gpu = hvd.rank() < int(os.environ["HOGBATCH_GPUS"])
    device = "cuda:0" if on_gpu else "cpu"
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(LENGTH, 6, generator=generator)
    data = TensorDataset(torch.arange(LENGTH), x, torch.sin(x.sum(1, keepdim=True)))
    torch.manual_seed(hvd.rank())  # rank 0's model counts
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters()
    )
    loader = hvd.adapt(
        DataLoader(data, 16, shuffle=True),
        optimizer,
        "adaptive-hogbatch",
        sizes={"cpu": (2, 8), "gpu": (8, 16)},
    )

    def loss_of(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        _, x, y = batch
        return (model(x.to(device)) - y.to(device)).square().mean()

    losses = []
    for _ in range(5):
        batches = []
        for batch in loader:
            batches.append(batch[0].tolist())
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
        seen = chain.from_iterable(chain.from_iterable(hvd.allgather_object(batches)))
        assert sorted(seen) == list(range(LENGTH))
        losses.append(loader.evaluate(loss_of))
    loader.drain()
    assert losses[-1] < losses[0]
    report = loader.report()
    assert report.workers[hvd.rank()].device_class == ("gpu" if on_gpu else "cpu")
    assert sum(worker.samples for worker in report.workers) == 5 * LENGTH
    assert {parameter.device.type for parameter in model.parameters()} == {
        torch.device(device).type
    }
    assert same_bits_everywhere(torch.cat([p.detach().cpu().view(-1) for p in model.parameters()]))
    hvd.barrier()


hvd.init()
torch.set_num_threads(1)
run_tests(globals())
hvd.shutdown()
