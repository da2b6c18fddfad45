"""The loss of all samples covers all of them, or is an error; never only a part."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from collectives import PeerTimeoutError
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.hogbatch_workers import adapted
from tests.gtopk.adaptive.modelled_ranks import on_ranks

LENGTH = 203


def numbers(batch: Any) -> torch.Tensor:
    """Return the mean of a batch's indices as its loss."""
    return batch[0].double().mean()


@pytest.mark.parametrize("batch", [LENGTH, 20])
@pytest.mark.parametrize("kinds", [("fast", "slow"), ("fast", "slow", "fast", "slow")])
def test_failed_evaluation_batch_is_evaluated_by_other_workers(
    kinds: tuple[str, ...], batch: int
) -> None:
    """Regression: nobody took the failed batch; the mean lacked it, or others waited forever."""

    def fails(batch: Any) -> torch.Tensor:
        raise MemoryError("of a GPU")

    def program(here: World) -> Any:
        loader, *_ = adapted(length=LENGTH, device_class=kinds[here.rank])
        try:
            found = loader.evaluate(numbers if here.rank else fails, batch=batch)
        except MemoryError:
            found = "failed"
        return found, loader.evaluate(numbers, batch=batch)

    mean = pytest.approx((LENGTH - 1) / 2)
    failed, *others = on_ranks(len(kinds), program)
    assert others == [(mean, mean)] * (len(kinds) - 1)
    if kinds.count("fast") == 1:  # otherwise another worker may have been faster
        assert failed == ("failed", mean)


@pytest.mark.parametrize(("batch", "ranks"), [(LENGTH, 2), (20, 3)])
def test_workers_waiting_for_stuck_evaluation_raise_timeout(batch: int, ranks: int) -> None:
    """Regression: slow workers waited forever for the fast one to claim the next batch."""
    is_over = threading.Event()
    have_raised = threading.Barrier(ranks - 1, action=is_over.set)

    def stuck(batch: Any) -> torch.Tensor:
        assert is_over.wait(30)
        return numbers(batch)

    def program(here: World) -> None:
        loader, *_ = adapted(length=LENGTH, device_class="slow" if here.rank else "fast")
        if here.rank == 0:
            loader.evaluate(stuck, batch=batch)
            return
        loader._ledger._timeout_seconds = 0.5
        message = rf"rank {here.rank} has waited 0.5 s for ranks \[0\] to"
        with pytest.raises(PeerTimeoutError, match=message):
            loader.evaluate(numbers, batch=batch)
        have_raised.wait(30)

    on_ranks(ranks, program)
