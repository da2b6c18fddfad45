"""Run under torchrun: at density 1, training equals PyTorch's DistributedDataParallel.

On two ranks bit for bit, as a sum of two has only one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

import gtopk.torch as hvd

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
}
STEPS = 3


class Case(NamedTuple):
    """How to train; each field doubles the number of cases."""

    optimizer: str
    passes: int
    clips: bool
    autocasts: bool
    uneven: bool


def network() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 3)
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4, generator=generator)
    return model


def losses(case: Case, model: torch.nn.Module, step: int) -> Iterator[torch.Tensor]:
    rank = torch.distributed.get_rank()
    for each in range(case.passes):
        generator = torch.Generator().manual_seed(1000 * step + 10 * each + rank)
        x = torch.randn(4 + (rank if case.uneven else 0), 6, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocasts):
            yield model(x).float().square().mean() / case.passes


def train_with_ddp(case: Case) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = losses(case, model, step)
        for each in range(case.passes):
            # Forward and backward passes are local, except the last.
            with model.no_sync() if each < case.passes - 1 else nullcontext():
                next(batches).backward()
        if case.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(case: Case, compression: Any, **options: Any) -> list[torch.Tensor]:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[case.optimizer](model.parameters()),
        model.named_parameters(),
        compression,
        case.passes,
        # Moments of the agreed gradients, as with DDP; "before" would use ranks' own.
        adam_steps="after",
        **options,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(case, model, step):
            loss.backward()
        optimizer.synchronize()
        if case.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], what: object) -> None:
    exact = torch.distributed.get_world_size() <= 2
    for one, other in zip(found, expected, strict=True):
        if exact:
            assert torch.equal(one, other), what
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=str(what))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    hvd.init()
    cases = itertools.product(OPTIMIZERS, (1, 4), *[(False, True)] * 3)
    ways = itertools.cycle(
        [
            (hvd.Compression.none, {}),
            (hvd.Compression.gtopk(1.0), {"bucket_bytes": 300}),
            (hvd.Compression.none, {"groups": 3}),
            (hvd.Compression.oktopk(1.0), {}),
            (hvd.Compression.gtopk(1.0, dense="bias"), {"bucket_bytes": 1}),
        ]
    )
    # Every third case still has all pairs of two fields' values, and each optimizer in each way.
    # With more than two ranks sums may differ in the last bit, and these cases are enough.
    some = list(cases)[:: 3 if hvd.size() <= 2 else 7]
    tried = list(zip(some, ways, strict=False))
    for arguments, (compression, options) in tried:
        case = Case(*arguments)
        found = train(case, compression, **options)
        assert_same(found, train_with_ddp(case), (case, compression, options))
    print(f"rank {hvd.rank()}: {len(tried)} ways to train are DDP's\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
