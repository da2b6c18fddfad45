"""A rank gets its batches with any default device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from gtopk.adaptive.sources import WorkerSeeds, rebuilt
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.indices import Indices
from tests.gtopk.adaptive.modelled_ranks import on_ranks


def test_worker_seeds_are_drawn_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default device when an epoch begins counts; "meta" acts as a GPU."""
    new, devices = torch.Generator, []

    def generator(device: Any) -> torch.Generator:
        devices.append(torch.device(device).type)
        return new()

    monkeypatch.setattr(torch, "Generator", generator)
    loader: Any = DataLoader(Indices(8), 4)
    again = rebuilt(loader)
    seeds = WorkerSeeds(again)
    seeds.begin(epoch=3)
    first = again.generator.initial_seed()
    with torch.device("meta"):
        seeds.begin(epoch=3)
    assert devices == ["cpu", "meta"]
    assert again.generator.initial_seed() == first


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["balanced", "abs"])
def test_loader_works_with_gpu_as_default_device(mode: str) -> None:
    pytest.importorskip("cupy", reason="no cupy here")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")

    def program(here: World) -> list[int]:
        weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), [("weight", weight)]
        )
        with torch.device("cuda"):
            loader = hvd.adapt(DataLoader(Indices(8), 4, shuffle=True), optimizer, mode)
            samples = []
            for batch in loader:
                samples += batch.tolist()
                optimizer.zero_grad()
                (weight * batch.float().mean()).sum().backward()
                optimizer.step()
            return samples

    (samples,) = on_ranks(1, program)
    assert sorted(samples) == list(range(8))
