"""LocalSGD continues if a replica is not finite, or if the sum of all overflows."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging
from gtopk.optim.step_checks import BUFFERS_KEPT
from tests.gtopk.local_rounds import (
    GTOPK,
    backward,
    close,
    descent,
    flat,
    held,
    momentum,
    network,
    on_ranks,
    weights,
)


@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.gtopk(density=0.2)], ids=repr
)
def test_nonfinite_replica_takes_the_other_ranks_model(
    compression: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        model = network()
        optimizer = LocalSGD(
            momentum(model.parameters()),
            1,
            averaging,
            compression,
            named_parameters=model.named_parameters(),
            max_skipped_steps=1,
        )
        z = weights(model)
        backward(model, transport.rank, 0)
        if transport.rank == 1:
            model[2].bias.grad[1] = float("nan")
        copy = network()
        with torch.no_grad():
            for parameter, other in zip(copy.parameters(), model.parameters(), strict=True):
                parameter -= 0.1 * other.grad
        optimizer.step()
        assert (optimizer.lost_replicas, optimizer.skipped_steps) == (1, 0)
        assert bool(optimizer.state) == (transport.rank != 1)  # NaN momentum is dropped
        seen = z, weights(model), weights(copy), held(optimizer)
        model[0].weight.grad.fill_(float("inf"))  # on all ranks, so no rank can continue
        with pytest.raises(FloatingPointError, match="2 outer steps in a row"):
            optimizer.step()
        assert torch.equal(weights(model), seen[1])
        assert torch.equal(held(optimizer), seen[3])
        assert (optimizer.lost_replicas, optimizer.skipped_steps) == (4, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        model[0].weight.grad.fill_(float("inf"))
        optimizer.step()  # failures before the state do not count as consecutive
        assert (optimizer.lost_replicas, optimizer.skipped_steps) == (7, 2)
        return seen

    with caplog.at_level(logging.WARNING, "gtopk"):
        z, after, own, e = zip(*on_ranks(3, rank), strict=True)
    assert all(torch.equal(one, after[0]) for one in after)
    close(z[0] - after[0] + sum(e), ((z[0] - own[0]) + (z[0] - own[2])) / 2)
    message = f"goes on without rank 1: a replica is not finite on rank 1: '2.bias'; {BUFFERS_KEPT}"
    assert message in caplog.text
    assert "changes nothing" in caplog.text


def test_overflowing_sum_changes_nothing_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        start = weights(model)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = LocalSGD(inner, 1, compression=hvd.Compression.fp16, max_skipped_steps=1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e6)  # beyond float16's range
        optimizer.step()
        assert torch.equal(weights(model), start)
        assert (optimizer.outer_steps, optimizer.skipped_steps) == (1, 1)
        assert optimizer.last_step.skipped
        with pytest.raises(FloatingPointError, match="the sum of replicas overflowed"):
            optimizer.step()

    with caplog.at_level(logging.WARNING, "gtopk"):
        on_ranks(2, rank)
    assert "changes nothing: the sum of replicas overflowed" in caplog.text


def test_overflowing_sum_leaves_the_residual_unchanged() -> None:
    def rank(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = LocalSGD(
            torch.optim.SGD([parameter], lr=1.0),
            1,
            outer=partial(torch.optim.SGD, lr=1.0),
            compression=hvd.Compression.gtopk(0.5),
        )
        counted = []
        for gradient in ([3e38, 2.9e38], [0.0, 2.9e38], [0.0, 0.0]):
            parameter.grad = torch.tensor(gradient)
            before = held(optimizer) if counted else None
            optimizer.step()
            counted.append(not optimizer.last_step.skipped)
            if not counted[-1]:
                assert torch.equal(held(optimizer), before)
        assert counted == [True, False, True]
        assert torch.equal(parameter.detach(), torch.tensor([-3e38, -2.9e38]))

    on_ranks(2, rank)


def test_steps_of_a_lost_replica_have_weight_0() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        optimizer = LocalSGD(descent(model.parameters()), 4, averaging, overlap_steps=4)
        for step in range(8):
            backward(model, transport.rank, step)
            if (transport.rank, step) == (1, 3):
                model[2].bias.grad[1] = float("nan")
            optimizer.step()
        before = torch.cat([z.reshape(-1) for part in optimizer._fragments for z in part.center])
        own = before - weights(model)  # rank 0's changes; rank 1 has discarded its own
        optimizer.outer_step()
        return before - weights(model), own

    (moved, changed), (same, nothing) = on_ranks(2, rank)
    assert torch.equal(moved, same)
    assert not nothing.any()
    close(moved, changed)


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_nonfinite_fragment_resets_the_whole_replica(overlap: int) -> None:
    """Also if only one fragment is not finite; the rest of its round is lost."""

    def rank(transport: LocalTransport) -> torch.Tensor:
        model = network()
        optimizer = LocalSGD(
            momentum(model.parameters()), 4, averaging, GTOPK, overlap_steps=overlap, fragments=4
        )
        for step in range(4 + overlap):
            backward(model, transport.rank, step)
            if (transport.rank, step) == (1, 2):
                model[2].weight.grad[1] = float("nan")  # of fragment 2, whose round is over then
            optimizer.step()
        assert optimizer.lost_replicas >= 1
        assert weights(model).isfinite().all()
        for step in range(10, 20):
            backward(model, transport.rank, step)
            optimizer.step()
        lost = optimizer.lost_replicas
        optimizer.outer_step()
        assert optimizer.lost_replicas == lost
        assert optimizer.skipped_steps == 0
        return weights(model)

    after = on_ranks(3, rank)
    assert all(torch.equal(after[0], each) for each in after)


@pytest.mark.parametrize("overlap", [0, 3, 4])
def test_replica_found_nonfinite_by_several_exchanges_is_lost_once(overlap: int) -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        parameters = [torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(4)]
        optimizer = LocalSGD(
            torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
            4,
            averaging,
            overlap_steps=overlap,
            fragments=4,
            max_skipped_steps=1,
        )
        for step in range(20):
            for p in parameters:
                p.grad = torch.full_like(p, 1.0)
                if (transport.rank, step) == (1, 4):
                    p.grad.fill_(float("nan"))
            optimizer.step()
        assert optimizer.lost_replicas == 1
        # The rank restarts once, and its steps count from then on.
        made = 15 - overlap if transport.rank == 1 else 20
        velocity = optimizer.state[parameters[0]]["momentum_buffer"]
        close(velocity, torch.full_like(velocity, sum(0.5**n for n in range(made))))
        assert all(fragment.wasted == 0 for fragment in optimizer._fragments)
        optimizer.outer_step()
        return flat(parameters)

    assert torch.equal(*on_ranks(2, rank))


def test_steps_of_a_lost_replica_have_weight_0_in_every_fragment() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        model, start = network(), weights(network())
        optimizer = LocalSGD(descent(model.parameters()), 4, averaging, fragments=4)
        backward(model, transport.rank, 0)
        if transport.rank == 1:
            model[0].weight.grad[1] = float("nan")  # of fragment 0, whose round is over then
        optimizer.step()
        assert optimizer.lost_replicas == 1
        is_back = torch.equal(weights(model)[54:], start[54:])
        assert is_back == (transport.rank == 1)
        replica = weights(model)
        backward(model, transport.rank, 1)
        own = start - replica + 0.1 * flat(p.grad for p in model.parameters())
        optimizer.step()  # exchanges fragment 1
        assert (optimizer.outer_steps, optimizer.lost_replicas) == (2, 1)
        part = slice(54, 63)
        return (start - weights(model))[part], own[part]

    moved, own = zip(*on_ranks(3, rank), strict=True)
    for each in moved:
        close(each, (2 * own[0] + own[1] + 2 * own[2]) / 5)


def test_overflowing_sum_of_one_fragment_leaves_the_others_exchanged() -> None:
    def rank(transport: LocalTransport) -> None:
        model, start = network(), network()
        optimizer = LocalSGD(
            torch.optim.SGD(model.parameters(), lr=1.0),
            4,
            averaging,
            hvd.Compression.fp16,
            fragments=4,
            max_skipped_steps=1,
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[0].bias.grad.fill_(1e6)  # beyond float16's range
        unchanged = []
        for number, before in enumerate(start.parameters()):
            optimizer.step()
            assert [
                p for p in model.parameters() if p not in set(optimizer.diverging_parameters)
            ] == [[*model.parameters()][number]]
            unchanged.append(torch.equal([*model.parameters()][number], before))
        assert unchanged == [False, True, False, False]
        assert (optimizer.outer_steps, optimizer.skipped_steps) == (4, 1)
        optimizer.step()
        with pytest.raises(FloatingPointError, match="2 outer steps in a row"):
            optimizer.step()

    on_ranks(2, rank)
