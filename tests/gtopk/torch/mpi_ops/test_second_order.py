"""The gradients of collectives have gradients, as needed for gradient penalties."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd

SPLITS = [[1, 2], [3, 0]]  # rows that each rank sends to each; rank 0 keeps one


def penalty(exchanged, own):
    """Return the squared gradient of a loss of the exchanged and own values."""
    losses = [y.square().sum() + x.pow(3).sum() for y, x in zip(exchanged, own, strict=True)]
    gradients = torch.autograd.grad(sum(losses), own, create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


def rows(rank):
    x = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(4, 2) * (1 + rank)
    return x.requires_grad_()


def alltoall_in_one(x, of_rank):
    """Return the result of `hvd.alltoall` with SPLITS; x: the rows of all ranks."""
    parts = [part.split([*splits, 4 - sum(splits)]) for part, splits in zip(x, SPLITS, strict=True)]
    return torch.cat([part[of_rank] for part in parts])


EXCHANGES = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs, rank: sum(xs)),
    "scaled": (
        lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5),
        lambda xs, rank: 1.5 * sum(xs) / 2,
    ),
    "grouped": (
        lambda x: torch.cat(hvd.grouped_allreduce([x, x[:2].sin()], op=hvd.Sum)),
        lambda xs, rank: torch.cat([sum(xs), sum(x[:2].sin() for x in xs)]),
    ),
    "alltoall": (lambda x: hvd.alltoall(x, SPLITS[hvd.rank()])[0], alltoall_in_one),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradient_penalty_equals_that_of_one_process(ranks, exchange):
    of_ranks, in_one = EXCHANGES[exchange]

    def program(rank):
        x = rows(rank)
        penalty([of_ranks(x)], [x]).backward()
        return x.grad

    own = [rows(rank) for rank in range(2)]
    penalty([in_one(own, rank) for rank in range(2)], own).backward()
    for found, expected in zip(ranks(2, program), own, strict=True):
        torch.testing.assert_close(found, expected.grad, rtol=1e-12, atol=1e-12)


def test_second_order_gradient_of_broadcast_is_reduced_to_the_root(ranks):
    def program(rank):
        x = rows(rank)
        y = hvd.broadcast(x, 1)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.tolist(), x.grad.tolist()

    x = rows(1).detach()
    zeros = (0 * x).tolist()
    assert ranks(2, program) == [(zeros, zeros), ((2 * x).tolist(), (4 * x).tolist())]


@pytest.mark.parametrize(
    "collective",
    [
        hvd.allreduce,
        hvd.alltoall,
        hvd.allgather,
        hvd.reducescatter,
        lambda x: hvd.broadcast(x, 0),
        lambda x: tuple(hvd.grouped_allreduce([x, x.sin()])),
        lambda x: tuple(hvd.grouped_allgather([x, x.sin()])),
        lambda x: tuple(hvd.grouped_reducescatter([x, x.sin()])),
        lambda x: hvd.alltoall(x, [3])[0],
    ],
)
def test_second_order_gradient_on_one_rank_passes_gradgradcheck(ranks, collective):
    def program(rank):
        return torch.autograd.gradgradcheck(lambda x: collective(x * x), rows(0))

    assert ranks(1, program) == [True]
