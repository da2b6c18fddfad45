"""LocalSGD with overlap_steps: ranks continue during the exchange of their changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging, nesterov
from tests.gtopk.local_rounds import (
    GTOPK,
    WHOLE,
    backward,
    close,
    descent,
    held,
    momentum,
    network,
    on_ranks,
    weights,
)


def simulate(
    ranks: int, steps: int, overlap: int, every: int, outer: Callable[[Any], Any]
) -> torch.Tensor:
    """Return all ranks' weights after a last exchange, computed in one process."""
    center, models = network(), [network() for _ in range(ranks)]
    inner = [momentum(model.parameters()) for model in models]
    outside = outer(list(center.parameters()))
    sent: list[torch.nn.Module] | None = None

    def clones() -> list[torch.nn.Module]:
        copies = [network() for _ in models]
        for copy, model in zip(copies, models, strict=True):
            copy.load_state_dict(model.state_dict())
        return copies

    def exchange(replicas: list[torch.nn.Module]) -> None:
        for z, *xs in zip(center.parameters(), *(r.parameters() for r in replicas), strict=True):
            z.grad = torch.stack([z.detach() - x.detach() for x in xs]).mean(0)
        outside.step()
        with torch.no_grad():
            for model, replica in zip(models, replicas, strict=True):
                for p, x, z in zip(
                    model.parameters(), replica.parameters(), center.parameters(), strict=True
                ):
                    p += z - x

    made = 0
    for step in range(steps):
        for rank, model in enumerate(models):
            backward(model, rank, step)
            inner[rank].step()
        made += 1
        if sent is not None and made == overlap:
            exchange(sent)
            sent = None
        if made == every:
            sent, made = clones(), 0
    if sent is not None:
        exchange(sent)
    if made:
        exchange(clones())
    return weights(models[0])


@pytest.mark.parametrize("compression", [hvd.Compression.none, WHOLE], ids=repr)
@pytest.mark.parametrize(
    ("overlap", "every", "outer"), [(1, 3, averaging), (2, 3, nesterov), (3, 3, averaging)]
)
def test_overlapped_exchange_equals_the_single_process_simulation(
    overlap: int, every: int, outer: Any, compression: Any
) -> None:
    for ranks in (1, 2, 3, 5):
        for steps in (9, 10, 11):  # the last exchange has just begun, is in progress, or is over

            def rank(
                transport: LocalTransport, steps: int = steps
            ) -> tuple[torch.Tensor, torch.Tensor]:
                model = network()
                optimizer = LocalSGD(
                    momentum(model.parameters()), every, outer, compression, overlap_steps=overlap
                )
                for step in range(steps):
                    backward(model, transport.rank, step)
                    optimizer.step()
                between = weights(model)
                optimizer.outer_step()
                return between, weights(model)

            between, after = zip(*on_ranks(ranks, rank), strict=True)
            assert all(torch.equal(each, after[0]) for each in after)
            assert ranks == 1 or not torch.equal(between[0], between[1])
            close(after[0], simulate(ranks, steps, overlap, every, outer))


def train(transport: LocalTransport, steps: range, model: torch.nn.Module, optimizer: Any) -> None:
    for step in steps:
        backward(model, transport.rank, step)
        optimizer.step()


def begin() -> tuple[torch.nn.Module, Any]:
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, LocalSGD(inner, 4, nesterov, GTOPK, overlap_steps=2)


@pytest.mark.parametrize("stop", [4, 5, 6, 7])
def test_run_resumed_within_an_exchange_is_bit_identical(stop: int) -> None:
    """Also if only one rank gets its state; its run does not change."""

    def rank(transport: LocalTransport) -> None:
        full_model, full_run = begin()
        train(transport, range(11), full_model, full_run)
        model, optimizer = begin()
        train(transport, range(stop), model, optimizer)
        if transport.rank == 0:
            optimizer.state_dict()
        train(transport, range(stop, 11), model, optimizer)
        assert torch.equal(weights(model), weights(full_model))
        model, optimizer = begin()
        train(transport, range(stop), model, optimizer)
        saved = torch.utils._pytree.tree_map(
            lambda part: part.clone() if isinstance(part, torch.Tensor) else part,
            (model.state_dict(), optimizer.state_dict()),
        )
        other, resumed = begin()
        train(transport, range(5), other, resumed)  # loading discards the exchange in progress
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(transport, range(stop, 11), other, resumed)
        assert torch.equal(weights(other), weights(full_model))
        assert torch.equal(held(resumed), held(full_run))
        assert resumed.outer_steps == full_run.outer_steps

    on_ranks(3, rank)


def test_state_broadcast_within_an_exchange_matches_the_root() -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = begin()
        train(transport, range(5), model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.steps_made == 1
        root = LocalTransport.__name__, weights(model)
        backward(model, 0, 5)  # the same as on the root
        optimizer.step()
        assert torch.equal(hvd.broadcast(weights(model), 0), weights(model)), root
        assert optimizer.outer_steps == 1
        optimizer.outer_step()
        assert optimizer.outer_steps == 2
        return weights(model)

    first, *others = on_ranks(3, rank)
    assert all(torch.equal(first, each) for each in others)


def test_nonfinite_replica_is_replaced_at_the_end_of_the_exchange() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, bool]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2, averaging, GTOPK, overlap_steps=1)
        for step in range(3):
            backward(model, transport.rank, step)
            if (transport.rank, step) == (1, 1):
                model[2].bias.grad[1] = float("nan")
            optimizer.step()
        assert optimizer.lost_replicas == 1
        finite = bool(weights(model).isfinite().all())
        for step in range(3, 6):
            backward(model, transport.rank, step)
            optimizer.step()
        optimizer.outer_step()
        assert (optimizer.lost_replicas, optimizer.skipped_steps) == (1, 0)
        return weights(model), finite

    after, finite = zip(*on_ranks(3, rank), strict=True)
    assert all(finite)
    assert all(torch.equal(after[0], each) for each in after)


@pytest.mark.parametrize("way", ["all load", "rank 0 loads, and broadcasts"])
def test_rank_with_a_lost_replica_loads_like_the_others(way: str) -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = begin()
        train(transport, range(2), model, optimizer)
        saved = torch.utils._pytree.tree_map(
            lambda part: part.clone() if isinstance(part, torch.Tensor) else part,
            (model.state_dict(), optimizer.state_dict()),
        )
        train(transport, range(2, 3), model, optimizer)
        backward(model, transport.rank, 3)
        if transport.rank == 1:
            model[2].bias.grad[1] = float("nan")
        optimizer.step()  # the exchange continues
        if way == "all load" or transport.rank == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if way != "all load":
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
        assert len(optimizer.state) == 4
        expected = saved[0] if way == "all load" else hvd.broadcast_object(saved[0], 0)
        assert torch.equal(weights(model), torch.cat([p.reshape(-1) for p in expected.values()]))
        train(transport, range(2, 7), model, optimizer)
        optimizer.outer_step()
        return weights(model)

    first, *others = on_ranks(3, rank)
    assert first.isfinite().all()
    assert all(torch.equal(first, each) for each in others)


def test_outer_step_uses_the_learning_rate_at_the_rounds_end() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, list[float]]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2, averaging, overlap_steps=2)
        (group,) = optimizer.outer.param_groups
        for step in range(6):
            backward(model, transport.rank, step)
            optimizer.step()
            group["lr"] *= 0.5
            if transport.rank == 0:
                optimizer.state_dict()  # has the changes earlier than on other ranks
        optimizer.outer_step()
        return weights(model), [group["lr"]]

    outcomes = on_ranks(2, rank)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1] == [0.5**6]


def test_parameters_unfrozen_later_raise() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        model[0].requires_grad_(False)
        optimizer = LocalSGD(
            descent(model.parameters()),
            2,
            named_parameters=model.named_parameters(),
            overlap_steps=1,
        )
        train(transport, range(3), model, optimizer)
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match="now others do, too: number 0"):
            train(transport, range(3, 5), model, optimizer)

    on_ranks(2, rank)


def test_frozen_layer_does_not_move_by_momentum() -> None:
    """It moves only once, by the changes exchanged as it froze."""

    def rank(transport: LocalTransport) -> list[float]:
        model = network()
        optimizer = LocalSGD(
            descent(model.parameters()),
            4,
            nesterov,
            named_parameters=model.named_parameters(),
            overlap_steps=2,
        )
        centers = []
        for step in range(24):
            if step == 12:
                model[0].requires_grad_(False)
            backward(model, transport.rank, step)
            optimizer.step()
            if step % 4 == 1:
                centers.append(optimizer.state_dict()["local_sgd"]["center"][0])
        return [float((b - a).norm()) for a, b in pairwise(centers)]

    for moved in on_ranks(2, rank):
        assert all(each > 0.01 for each in moved[:3])
        assert moved[3:] == [0.0, 0.0]


def test_repeated_load_counts_a_round_once() -> None:
    def rank(transport: LocalTransport) -> None:
        model, optimizer = begin()
        train(transport, range(5), model, optimizer)
        for _ in range(3):
            optimizer.load_state_dict(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.outer_steps == 1
        optimizer.outer_step()
        assert optimizer.outer_steps == 2

    on_ranks(2, rank)


def test_state_dict_between_forward_and_backward_is_allowed() -> None:
    def rank(transport: LocalTransport) -> None:
        model, optimizer = begin()
        train(transport, range(4), model, optimizer)
        loss = model(torch.ones(2, 6, dtype=torch.float64)).square().mean()
        optimizer.state_dict()
        loss.backward()

    on_ranks(2, rank)


def test_failed_exchange_loses_no_step() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, start = network(), weights(network())
        optimizer = LocalSGD(descent(model.parameters()), 2, averaging, overlap_steps=1)
        (group,) = optimizer.outer.param_groups
        own, made = torch.zeros_like(start), 0
        for step in range(5):
            group["lr"] = 1.0 + (transport.rank if step == 1 else 0)  # unequal once
            backward(model, transport.rank, step)
            own += 0.1 * torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            if step == 2 and transport.rank == 0:
                saved = optimizer.state_dict()["local_sgd"]  # waits; `step` raises the error
                assert (saved["steps_made"], saved["sent"]) == (2, [])
            if step == 2:
                with pytest.raises(hvd.HorovodInternalError, match="rank 1: outer SGD"):
                    optimizer.step()
                made = optimizer.steps_made
            else:
                optimizer.step()
        assert made == 3
        optimizer.outer_step()
        return start - weights(model), own

    moved, own = zip(*on_ranks(2, rank), strict=True)
    assert torch.equal(*moved)
    close(moved[0], sum(own) / 2)


def test_last_step_reports_hidden_seconds() -> None:
    def rank(transport: LocalTransport) -> None:
        model, optimizer = begin()
        train(transport, range(4), model, optimizer)
        assert optimizer.last_step is None
        while not any(optimizer._fragments.first._span):  # until the engine's thread has finished
            time.sleep(0.001)
        train(transport, range(4, 6), model, optimizer)
        report = optimizer.last_step
        assert (report.local_steps, optimizer.steps_made) == (4, 2)
        assert 0.0 < report.hidden_seconds <= report.working_seconds
        optimizer.outer_step()  # waits
        assert optimizer.last_step.hidden_seconds == 0.0

    on_ranks(2, rank)


@pytest.mark.parametrize(
    ("inner_steps", "overlap_steps", "message"),
    [
        (4, 5, "at most inner_steps=4, got 5"),
        (None, 1, r"outer_step\(\) waits for it"),
        (4, -1, "overlap_steps"),
        (4, 1.5, "overlap_steps"),
    ],
)
def test_invalid_overlap_steps_raise(inner_steps: Any, overlap_steps: Any, message: str) -> None:
    def rank(transport: LocalTransport) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            LocalSGD(descent(network().parameters()), inner_steps, overlap_steps=overlap_steps)

    on_ranks(1, rank)
