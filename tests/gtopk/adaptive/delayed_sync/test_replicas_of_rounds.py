"""Replicas are compared in mode "abs" too, one round after the comparison is due."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks
from tests.gtopk.adaptive.sums_of_samples import Model, data, prompt, run, stop_apart


def opened(here: World, length: int, **options: Any) -> Any:
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options
    )
    loader = hvd.adapt(DataLoader(data(length), 8, shuffle=True), optimizer, "abs", micro_batch=4)
    return prompt((loader, model, optimizer))


def diverge(here: World, model: Model) -> None:
    with torch.no_grad():
        model.weight += here.rank == 1


@pytest.mark.parametrize("options", [{"check_every": 1}, {"on_divergence": "error"}])
def test_replicas_that_differ_from_the_start_raise_on_all_ranks(options: dict[str, Any]) -> None:
    def program(here: World) -> str:
        loader, model, optimizer = opened(here, 96, **options)
        diverge(here, model)
        with pytest.raises(hvd.HorovodInternalError) as raised:
            run(loader, model, optimizer)
        assert loader.round <= 3
        return str(raised.value)

    first, other = on_ranks(2, program)
    assert first == other
    assert "the replicas are no longer the same: parameter 'weight'" in first


@pytest.mark.parametrize("heals", [False, True])
def test_replicas_are_compared_every_check_every_rounds(heals: bool) -> None:
    """After rounds 1, 3 and 6 of 9; the replicas diverge after the first of these."""

    def program(here: World) -> Any:
        loader, model, optimizer = opened(
            here, 216, check_every=3, on_divergence="heal" if heals else "warn"
        )
        found, has_diverged = [], False
        for _, x in loader:
            model(x).mean().backward()
            optimizer.step()
            if loader.round == 3 and not has_diverged:
                has_diverged = True
                diverge(here, model)
            found.append((loader.round, optimizer.divergences))
        return dict(found), model.weight.detach()

    (rounds, weight), *others = on_ranks(3, program)
    assert rounds[3] == 0
    found = 1 if heals else 2
    assert rounds[max(rounds)] == found
    assert [other[max(other)] for other, _ in others] == [found] * 2
    assert all(torch.equal(weight, other) for _, other in others) == heals


@pytest.mark.parametrize("differing_option", [{"check_every": 1}, {"on_divergence": "heal"}])
def test_differing_replica_check_settings_raise_on_every_rank(
    differing_option: dict[str, Any],
) -> None:
    """Regression: one rank's checksums met another's settings, and the error named neither."""

    def program(here: World) -> str:
        options = {"check_every": 2, **(differing_option if here.rank else {})}
        with pytest.raises(hvd.HorovodInternalError) as raised:
            opened(here, 96, **options)
        return str(raised.value)

    for error in on_ranks(2, program):
        assert f"{next(iter(differing_option))}={next(iter(differing_option.values()))!r}" in error


@pytest.mark.parametrize("every", [1, 2, 5])
def test_replica_check_continues_after_state_loaded_in_a_due_round(every: int) -> None:
    """One rank has sent its part of that round, and the other has not."""
    has_loaded = threading.Event()

    def program(here: World) -> Any:
        parts = loader, model, _ = opened(here, 160, check_every=every)
        states: list[Any] = []
        run(*parts, 2, states)
        weight = model.weight.detach().clone()
        stop_apart(here, *parts)
        if here.rank == 1:
            assert has_loaded.wait(30)  # before this rank comes
        loader.load_state_dict(states[0])
        has_loaded.set()
        with torch.no_grad():
            model.weight.copy_(weight)
        run(*prompt(parts))
        diverge(here, model)
        with pytest.raises(hvd.HorovodInternalError, match="the replicas are no longer the same"):
            run(*parts)

    on_ranks(2, program)
