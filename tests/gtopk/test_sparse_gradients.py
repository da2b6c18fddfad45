"""Gradients that are sparse by rows: reduced as rows, the sum that of dense ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from collectives.transports import LocalTransport
from gtopk import world
from gtopk.compression import Compression
from gtopk.optimizer import DistributedOptimizer

ROWS, WIDTH, STEPS = 50, 3, 3


def tables() -> torch.nn.ParameterDict:
    generator = torch.Generator().manual_seed(7)
    return torch.nn.ParameterDict(
        {
            "embedding": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator),
            "output": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator),
            "bias": torch.zeros(WIDTH, dtype=torch.float64),
        }
    )


def drawn(rank: int, step: int) -> torch.Tensor:
    """Return rows of the table, some of them many times; none on rank 2's first step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    count = 0 if (rank, step) == (2, 0) else 20
    return torch.randint(10, (count,), generator=generator) * (rank + 1)


def loss(model: torch.nn.ParameterDict, rows: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    hidden = torch.tanh(F.embedding(rows, model["embedding"], sparse=sparse) + model["bias"])
    scores = hidden @ F.embedding(rows.unique(), model["output"], sparse=sparse).T
    return scores.square().sum()


def flat(model: torch.nn.ParameterDict) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.values()])


def trained_as_one(size: int) -> torch.Tensor:
    model = tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = sum(loss(model, drawn(rank, step), sparse=False) for rank in range(size)) / size
        mean.backward()
        optimizer.step()
    return flat(model)


def test_rows_add_up_to_the_step_of_one_process_and_are_sent_once(threads) -> None:
    def program(transport: LocalTransport) -> tuple[torch.Tensor, list[bool], list[int]]:
        model = tables()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                named_parameters=model.named_parameters(),
                compression=Compression.gtopk(1.0),
            )
            sparse, sent = [], []
            for step in range(STEPS):
                optimizer.zero_grad()
                rows = drawn(transport.rank, step)
                loss(model, rows, sparse=True).backward()
                optimizer.step()
                sparse += [model[name].grad.is_sparse for name in ("embedding", "output")]
                sent.append(optimizer.last_step.selected - 2 * len(rows.unique()))
        return flat(model), sparse, sent

    for size in (1, 2, 3):
        ends = threads(size, program)
        for end, sparse, sent in ends:
            assert torch.equal(end, ends[0][0])
            torch.testing.assert_close(end, trained_as_one(size), rtol=1e-12, atol=1e-12)
            assert all(sparse)
            assert all(dense in (0, WIDTH) for dense in sent)  # the bias alone is besides
