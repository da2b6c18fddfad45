"""PowerSGD, a baseline: agreement between ranks, messages, and the residual."""

from __future__ import annotations

import pytest
import torch

from collectives import run_ranks
from collectives.transports import Transport, local_world
from mpi_scripts.low_rank import LowRank

SHAPES = {"weight": (12, 10), "kernel": (6, 5, 3, 3), "bias": (12,)}
COPIES = 40


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(*SHAPES[name], generator=generator)


def averaged(size: int, low_rank: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Return every rank's change of the parameters, summed over the steps."""

    def program(transport: Transport) -> dict[str, torch.Tensor]:
        parameters = {name: torch.nn.Parameter(torch.zeros(s)) for name, s in SHAPES.items()}
        inner = torch.optim.SGD(parameters.values(), lr=1.0)
        optimizer = LowRank(inner, parameters.items(), low_rank, transport)
        for step in range(steps):
            for name, parameter in parameters.items():
                parameter.grad = gradient(name, transport.rank, step)
            optimizer.step()
        return {name: -parameter.detach() for name, parameter in parameters.items()}

    return run_ranks(local_world(size), program)


@pytest.mark.parametrize("size", [1, 3])
def test_powersgd_ranks_agree_and_average_vectors_uncompressed(size: int) -> None:
    moved = averaged(size, low_rank=2, steps=3)
    for name in SHAPES:
        assert all(torch.equal(of_rank[name], moved[0][name]) for of_rank in moved)
    mean = sum(gradient("bias", rank, step) for rank in range(size) for step in range(3)) / size
    torch.testing.assert_close(moved[0]["bias"], mean)


def test_powersgd_step_is_three_allreduces_for_any_number_of_matrices() -> None:
    shapes = COPIES * list(SHAPES.values())

    def program(transport: Transport) -> int:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        named = [(str(number), each) for number, each in enumerate(parameters)]
        optimizer = LowRank(torch.optim.SGD(parameters, lr=1.0), named, 2, transport)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        return transport.traffic.sent_bytes

    elements = COPIES * (12 + 2 * (12 + 10) + 2 * (6 + 45))
    sent = run_ranks(local_world(4), program)
    assert sum(sent) == 2 * 3 * 4 * elements  # alone, a vector would travel whole to everyone


def test_powersgd_passes_a_rank_1_gradient_unchanged() -> None:
    """With one rank and a matrix of rank 1 only rounding remains."""
    matrix = torch.outer(torch.arange(1.0, 13.0), torch.arange(1.0, 11.0))
    parameter = torch.nn.Parameter(torch.zeros(12, 10))
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = LowRank(inner, [("weight", parameter)], 1, local_world(1)[0])
    parameter.grad = matrix.clone()
    optimizer.step()
    torch.testing.assert_close(-parameter.detach(), matrix)


def test_powersgd_residual_is_applied_in_later_steps() -> None:
    """The error moves to the next step, so a constant gradient is applied in full in the end."""
    parameter = torch.nn.Parameter(torch.zeros(12, 10))
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = LowRank(inner, [("weight", parameter)], 2, local_world(1)[0])
    for _ in range(60):
        parameter.grad = gradient("weight", 0, 0)
        optimizer.step()
    mean = -parameter.detach() / 60
    assert (mean - gradient("weight", 0, 0)).norm() < 0.1 * gradient("weight", 0, 0).norm()


def test_powersgd_of_adam_steps_moves_what_is_sent_whole_as_adam_does() -> None:
    bias, expected = (torch.nn.Parameter(torch.zeros(12)) for _ in range(2))
    inner = torch.optim.SGD([bias], lr=0.1)
    optimizer = LowRank(inner, [("bias", bias)], 2, local_world(1)[0], betas=(0.8, 0.9))
    adam = torch.optim.Adam([expected], lr=0.1, betas=(0.8, 0.9))
    for step in range(5):
        bias.grad, expected.grad = gradient("bias", 0, step), gradient("bias", 0, step)
        optimizer.step()
        adam.step()
    torch.testing.assert_close(bias, expected)
