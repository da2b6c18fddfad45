"""Train while threads also use the ranks, and DataLoader workers of every kind come and go."""

from __future__ import annotations

import threading

import light_torch  # noqa: F401

import torch
from torch.utils.data import DataLoader, Dataset

import gtopk.torch as hvd

STEPS, THREADS, SUMS = 12, 4, 50


class Numbers(Dataset):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index))


def add_up(number: int, wrong: list[int]) -> None:
    """Sum over the ranks repeatedly, under this thread's own names."""
    for turn in range(SUMS):
        mine = torch.tensor([hvd.rank() + turn])
        total = hvd.allreduce(mine, op=hvd.Sum, name=f"thread {number}")
        if int(total) != hvd.size() * turn + sum(range(hvd.size())):
            wrong.append(number)


def train(how: str, persistent: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.5),
    )
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=how,
        persistent_workers=persistent,
    )
    wrong: list[int] = []
    threads = [threading.Thread(target=add_up, args=(n, wrong)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch / 10).square().mean().backward()
            optimizer.step()
    for thread in threads:
        thread.join()
    assert wrong == []
    return model.weight.detach()


if __name__ == "__main__":
    hvd.init()
    results = [
        train(how, persistent)
        for how in ("fork", "forkserver", "spawn")
        for persistent in (False, True)
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    print(f"rank {hvd.rank()}: nobody was in the way\n", end="", flush=True)
    hvd.shutdown()
