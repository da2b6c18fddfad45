"""LocalSGD with residual_decay: it multiplies the residual, then adds a round's changes."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging
from tests.gtopk.local_rounds import GTOPK, flat, held, on_ranks


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_residual_decays_before_changes_are_added(decay: float, fragments: int) -> None:
    """Exactly: all values are short binary fractions, and the ranks' weights powers of two."""

    def rank(transport: LocalTransport) -> list[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(transport.rank)
        layers = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (40, 30, 20)]
        optimizer = LocalSGD(
            torch.optim.SGD(layers, lr=0.25),
            None if fragments == 1 else 64,
            averaging,
            GTOPK,
            fragments=fragments,
            residual_decay=decay,
        )
        # On 3 ranks: 2, 1 and 1 of 4 steps.
        steps = 2 if (transport.size, transport.rank) == (3, 0) else 1
        before, rounds = torch.zeros(90, dtype=torch.float64), []
        for _ in range(5):
            z = flat(layers)
            for _ in range(steps):
                for p in layers:
                    p.grad = torch.randint(-512, 512, p.shape, generator=generator).double() / 64
                optimizer.step()
            share = steps / {3: 4}.get(transport.size, transport.size)
            change = share * (z - flat(layers))
            optimizer.outer_step()
            e = held(optimizer)
            rounds.append((z - flat(layers), decay * before + change, e))
            before = e
        return rounds

    for ranks in (1, 2, 3, 4):
        some = False
        for turn in zip(*on_ranks(ranks, rank), strict=True):
            sent, expected, after = zip(*turn, strict=True)
            assert all(torch.equal(each, sent[0]) for each in sent)
            assert torch.equal(sum(after), sum(expected) - sent[0])
            some |= bool(sum(after).any())
        assert some


def test_residual_does_not_decay_in_a_skipped_step() -> None:
    def rank(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = LocalSGD(
            torch.optim.SGD([parameter], lr=1.0),
            1,
            averaging,
            hvd.Compression.gtopk(0.5),
            residual_decay=0.5,
        )
        for gradient in ([3e38, 2e38], [0.0, 2.9e38]):
            before = held(optimizer)
            parameter.grad = torch.tensor(gradient)
            optimizer.step()
        assert optimizer.skipped_steps == 1
        assert torch.equal(held(optimizer), before)
        assert before.any()

    on_ranks(2, rank)
