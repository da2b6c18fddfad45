"""DeMo, a baseline: its transform, its agreement between ranks, and its momentum."""

from __future__ import annotations

import pytest
import torch

from collectives import run_ranks
from collectives.transports import Transport, local_world
from mpi_scripts.decoupled import DECAY, Chunks, DecoupledMomentum, cosines

SHAPES = {"weight": (128, 96), "kernel": (6, 5, 3, 3), "bias": (12,)}


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(*SHAPES[name], generator=generator)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_cosine_transform_is_orthonormal(size: int) -> None:
    basis = cosines(size)
    torch.testing.assert_close(basis @ basis.T, torch.eye(size), atol=1e-6, rtol=0)
    torch.testing.assert_close(basis @ torch.ones(size), size**0.5 * torch.eye(size)[0])


@pytest.mark.parametrize("shape", SHAPES.values())
def test_chunk_components_transform_back_to_the_values(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    chunks = Chunks(torch.nn.Parameter(values), 32)
    components = chunks.components(values)
    torch.testing.assert_close(components.norm(), values.norm())
    torch.testing.assert_close(chunks.values(components, values.shape), values)


def test_demo_ranks_agree_on_sign_updates_and_send_k_per_chunk() -> None:
    steps = 3

    def program(transport: Transport) -> tuple[dict[str, torch.Tensor], int]:
        parameters = {name: torch.nn.Parameter(torch.zeros(s)) for name, s in SHAPES.items()}
        inner = torch.optim.SGD(parameters.values(), lr=1.0)
        optimizer = DecoupledMomentum(inner, parameters.items(), 32, transport)
        for step in range(steps):
            for name, parameter in parameters.items():
                parameter.grad = gradient(name, transport.rank, step)
            optimizer.step()
        return {n: each.detach() for n, each in parameters.items()}, optimizer.last_step.sent_bytes

    ranks = run_ranks(local_world(3), program)
    entries = 4 * 32 + 32 + 12  # chunks of 64 x 48, of 6 x 45 and of 12, which sends all
    for moved, sent in ranks:
        assert 0 <= sent - 2 * 4 * entries <= 64  # the allgather also sends sizes
        for name in SHAPES:
            assert torch.equal(moved[name], ranks[0][0][name])
            assert set(moved[name].unique().tolist()) <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}


def test_demo_momentum_keeps_unsent_components() -> None:
    parameter = torch.nn.Parameter(torch.zeros(128, 96))
    named = [("weight", parameter)]
    inner = torch.optim.SGD([parameter], lr=0.0)
    optimizer = DecoupledMomentum(inner, named, 32, local_world(1)[0])
    expected = torch.zeros(128, 96)
    for step in range(3):
        parameter.grad = gradient("weight", 0, step)
        expected = DECAY * expected + parameter.grad
        chunks = optimizer._chunks[0]
        components = chunks.components(expected)
        indices = components.abs().topk(32, dim=1).indices
        kept = components.gather(1, indices)
        sent = torch.zeros_like(components).scatter_(1, indices, kept.bfloat16().float())
        optimizer.step()
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, chunks.values(sent, expected.shape).sign())
        expected = expected - chunks.values(sent, expected.shape)
        torch.testing.assert_close(optimizer._momenta[0], expected)
