"""Run on two ranks or more with a short heartbeat: ranks that are out of step, not dead.

A rank is slow, or keeps Python's lock, for longer than the heartbeat's timeout; it is slow in every
step, and reported; its hooks run in another order; it has a batch less.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import light_torch  # noqa: F401

import torch
from checks import run_tests

import gtopk.torch as hvd

LONG_SECONDS = 1.4 * float(os.environ["GTOPK_HEARTBEAT_TIMEOUT"])
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1


class Branches(torch.nn.Module):
    """Two branches, whose gradients become ready in the reverse order of their computation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, right_first: bool = False) -> torch.Tensor:
        if right_first:
            right = self.right(x)
            left = self.left(x)
        else:
            left = self.left(x)
            right = self.right(x)
        return left.square().mean() + right.square().mean()


def train(
    before_step: Callable[[int], None] = lambda step: None,
    right_first: bool = False,
    batches: int = 5,
) -> tuple[Branches, Any]:
    model = Branches()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.1),
        bucket_bytes=64,
    )
    for step in range(batches):
        optimizer.zero_grad()
        before_step(step)
        generator = torch.Generator().manual_seed(10 * step + RANK)
        model(torch.randn(4, 8, generator=generator), right_first).backward()
        optimizer.step()
    hvd.join()
    return model, optimizer


def check_equal(model: Branches, expected: Branches) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_slow_rank_and_one_that_keeps_the_gil_change_no_bit() -> None:
    def be_slow(step: int) -> None:
        if step == 2 and RANK == LAST:
            time.sleep(LONG_SECONDS)
        if step == 3 and RANK == 0:
            ctypes.PyDLL(None).usleep(int(1e6 * LONG_SECONDS))

    check_equal(train(be_slow)[0], train()[0])


def test_rank_slow_in_every_step_gets_a_low_straggler_score() -> None:
    begin, slow_steps = 4, 22

    def be_slow(step: int) -> None:
        if step >= begin and RANK == LAST:
            time.sleep(0.15)

    optimizer = train(be_slow, batches=begin + slow_steps)[1]
    scores = optimizer.straggler_scores
    assert scores[LAST] <= 0.25, scores
    assert max(scores) == 1


def test_hook_order_that_differs_between_ranks_changes_no_bit() -> None:
    check_equal(train(right_first=RANK == LAST)[0], train()[0])


def test_rank_with_fewer_batches_joins_and_the_others_continue() -> None:
    model, shorter = train(batches=5 - (RANK == LAST))[0], train(batches=4)[0]
    if RANK == LAST:
        check_equal(model, shorter)
    else:
        assert not torch.equal(model.left.weight, shorter.left.weight)


if __name__ == "__main__":
    run_tests(globals())
    print(f"rank {RANK}: all went on\n", end="", flush=True)
    hvd.shutdown()
