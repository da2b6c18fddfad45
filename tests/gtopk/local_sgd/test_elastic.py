"""LocalSGD in hvd.elastic: ranks resume where rank 0 was in its round; residuals stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging
from gtopk.torch.elastic import TorchState
from tests.gtopk.local_rounds import backward, close, flat, held, network, on_ranks, weights

INNER_STEPS = 3
sparse = hvd.Compression.gtopk(density=0.1)


def begin() -> tuple[torch.nn.Module, Any, TorchState]:
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = LocalSGD(inner, INNER_STEPS, averaging, sparse)
    return model, optimizer, TorchState(model, optimizer)


def train(rank: int, model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.step()


def center(optimizer: Any) -> torch.Tensor:
    return flat(optimizer.state_dict()["local_sgd"]["center"])


@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize("steps", [6, 7])
def test_job_resumes_from_a_commit_on_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, after: int
) -> None:
    """Between two rounds, and within one, which another number of ranks restarts."""
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))

    def first(transport: LocalTransport) -> torch.Tensor:
        model, optimizer, state = begin()
        state.sync()
        train(transport.rank, model, optimizer, range(steps))
        state.commit()
        return held(optimizer)

    def then(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer, state = begin()
        state.sync()
        steps_made = steps % INNER_STEPS if after == 2 else 0
        assert (optimizer.outer_steps, optimizer.steps_made) == (2, steps_made)
        before = held(optimizer)
        train(transport.rank, model, optimizer, range(steps_made, INNER_STEPS))
        assert (optimizer.outer_steps, optimizer.steps_made) == (3, 0)
        return before, weights(model)

    saved = on_ranks(2, first)
    loaded, models = zip(*on_ranks(after, then), strict=True)
    close(sum(loaded), sum(saved))
    assert all(torch.equal(model, models[0]) for model in models)


def test_recovery_resumes_at_rank_0s_step_of_the_round() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        model, optimizer, state = begin()
        state.sync()
        train(transport.rank, model, optimizer, range(INNER_STEPS))
        if transport.rank == 0:  # ranks may take different numbers of steps
            train(0, model, optimizer, range(INNER_STEPS, INNER_STEPS + 1))
        state.commit()
        own, own_residual = weights(model), held(optimizer)
        train(transport.rank, model, optimizer, range(1))
        state.restore()
        state.sync()
        assert torch.equal(held(optimizer), own_residual)
        assert (optimizer.outer_steps, optimizer.steps_made) == (1, 1)
        seen = own, weights(model), center(optimizer)
        state.restore()  # all ranks agreed on the commit
        assert torch.equal(weights(model), seen[1])
        assert torch.equal(center(optimizer), seen[2])
        optimizer.outer_step()
        return *seen, weights(model)

    ours, *others = on_ranks(3, rank)
    assert not torch.equal(ours[0], ours[2])
    for own, replica, z, moved in others:
        assert torch.equal(own, z)
        assert torch.equal(replica, ours[0])
        assert torch.equal(z, ours[2])
        assert torch.equal(moved, ours[3])


def test_gradient_residuals_of_a_commit_are_not_loaded_as_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))

    def first(transport: LocalTransport) -> bool:
        model = network()
        inner = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner, compression=sparse)
        train(transport.rank, model, optimizer, range(2))
        TorchState(model, optimizer).commit()
        return bool(held(optimizer).any())

    def then(transport: LocalTransport) -> bool:
        _, optimizer, state = begin()
        state.sync()
        return bool(held(optimizer).any())

    assert on_ranks(2, first) == [True, True]
    assert on_ranks(2, then) == [False, False]
    assert "that of the state holds gradients" in caplog.text
