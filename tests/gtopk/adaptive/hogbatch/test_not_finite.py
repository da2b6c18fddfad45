"""Non-finite updates never reach the shared model, and raise if they persist."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.hogbatch_workers import BATCH, adapted, classes, data, loss_of, sgd, train
from tests.gtopk.adaptive.modelled_ranks import network, on_ranks


def test_nonfinite_updates_never_reach_the_model() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(device_class=classes(here))
        for number, (_, x, y) in enumerate(loader):
            optimizer.zero_grad()
            (loss_of(model, x, y) * (math.nan if number == 0 else 1)).backward()
            optimizer.step()
        return loader.report()

    report = on_ranks(2, program)[0]
    assert [worker.skipped for worker in report.workers] == [1, 1]
    assert report.updates > 10


def test_nonfinite_shared_model_raises_after_few_skipped_updates() -> None:
    """Regression: every later update was skipped silently, in all remaining epochs."""

    def program(here: World) -> None:
        loader, model, optimizer = adapted(device_class=classes(here))
        if here.rank == 0:
            model[2].weight.data[0, 0] = math.inf
        here.transport.barrier()
        message = rf"rank {here.rank}: the shared model is no longer finite, in '2.weight'"
        with pytest.raises(FloatingPointError, match=message):
            train(loader, model, optimizer)
        assert loader.report().workers[here.rank].skipped == 3

    on_ranks(2, program)


def test_persistently_nonfinite_gradients_raise() -> None:
    def program(here: World) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), max_skipped_steps=4
        )
        loader = hvd.adapt(
            DataLoader(data(), BATCH), optimizer, "hogbatch", device_class="slow", sizes={"slow": 4}
        )
        message = "rank 0: 5 updates in a row were skipped, .* gradient of '0.weight' is not finite"
        for number, (_, x, y) in enumerate(loader):
            optimizer.zero_grad()
            (loss_of(model, x, y) * (1 if number < 3 else math.nan)).backward()
            with pytest.raises(FloatingPointError, match=message) if number == 7 else nullcontext():
                optimizer.step()
            if number == 7:
                break

    on_ranks(1, program)
