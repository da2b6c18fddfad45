"""The residual is sent even if its parameters change their exchange; nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Sum
from gtopk.runtime.world import world

SHAPES = {"matrix": [8, 9], "vector": [40]}
GIVES_NOTHING = 1  # this rank has no residual


class Seen(NamedTuple):
    """A rank's applied sum, residual, and sum of gradients of all steps that count: [elements]."""

    applied: torch.Tensor
    held: torch.Tensor
    given: torch.Tensor


class Training:
    """Steps of rate 1 from 0, so that the applied sum is minus the parameters."""

    def __init__(self, transport: LocalTransport) -> None:
        self.rank = transport.rank
        self.model = torch.nn.ParameterDict(
            {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        )
        self.given = self.flat(torch.zeros(shape) for shape in SHAPES.values())
        self.optimizer: Any = None

    def distribute(self, compression: Any, state: Any = None) -> None:
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0),
            self.model.items(),
            compression,
            op=Sum,
            missing_gradients="zeros",
            bucket_bytes=1,
        )
        if state is not None:
            self.optimizer.load_state_dict(state)

    def draw(self, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64)
            * (self.rank != GIVES_NOTHING)
            for shape in SHAPES.values()
        ]

    def step(self, *gradients: torch.Tensor | None) -> None:
        """Step with these gradients, in the parameters' order; None: this rank has none."""
        for parameter, gradient in zip(self.model.values(), gradients, strict=True):
            parameter.grad = gradient
        given = [
            parameter.new_zeros(parameter.shape) if gradient is None else gradient.to_dense()
            for parameter, gradient in zip(self.model.values(), gradients, strict=True)
        ]
        given = self.flat(given).clone()
        self.optimizer.step()
        if not self.optimizer.last_step.skipped:
            self.given = self.given + given

    def seen(self) -> Seen:
        (own,) = self.optimizer.state_dict()["gtopk"]["held"].values()
        none = {name: {"residual": torch.zeros(shape)} for name, shape in SHAPES.items()}
        held = self.flat((none | own)[name]["residual"] for name in SHAPES)
        return Seen(-self.flat(self.model.values()), held, self.given)

    @staticmethod
    def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def check_nothing_is_lost(ranks: list[list[Seen]]) -> None:
    """Check at every snapshot, per coordinate, summed over ranks."""
    for applied, held, given in (zip(*look, strict=True) for look in zip(*ranks, strict=True)):
        torch.testing.assert_close(applied[0] + sum(held), sum(given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "then",
    [
        Compression.none,
        Compression.fp16,
        Compression.bf16,
        Compression.gtopk(0.1, dense_vectors=True),
        Compression.gtopk(0.1, dense="matrix"),
        Compression.topk(0.1, dense_under=1000),
        Compression.gtopk(0.1, dense_vectors=True, momentum_correction=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("joins", [False, True])
def test_another_compression_goes_on_from_what_was_held_back(threads, then, joins):
    """It is sent in parts, in the steps that count, also on a rank that has joined."""

    def program(transport: LocalTransport) -> list[Seen]:
        training = Training(transport)
        with world.entered(transport) as here:
            training.distribute(Compression.gtopk(0.1))
            for step in range(3):
                training.step(*training.draw(step))
            training.distribute(then, training.optimizer.state_dict())
            looks = [training.seen()]
            training.step(torch.full(SHAPES["matrix"], torch.nan).double(), None)
            assert training.optimizer.skipped_steps == 1
            looks.append(training.seen())
            if not (joins and training.rank == 2):
                training.step(*training.draw(3))
            here.engine.join().wait()
            looks.append(training.seen())
            for step in range(4, 12):
                training.step(*training.draw(step))
            return [*looks, training.seen()]

    ranks = threads(3, program)
    # Later steps round to 16 bits, or use a velocity.
    check_nothing_is_lost(ranks if then is Compression.none else [looks[:3] for looks in ranks])
    for rank, (loaded, skipped, *_) in enumerate(ranks):
        assert torch.equal(loaded.held, skipped.held)
        assert loaded.held.any() == (rank != GIVES_NOTHING)
    if isinstance(then, type):
        assert any(looks[2].held.any() for looks in ranks)  # not sent all at once
        assert not any(looks[3].held.any() for looks in ranks)


def test_after_what_was_held_back_the_compression_is_as_it_was_asked_for(threads):
    def program(transport: LocalTransport) -> None:
        training = Training(transport)
        with world.entered(transport):
            training.distribute(Compression.gtopk(0.1))
            training.step(*training.draw(0))
            training.distribute(Compression.fp16, training.optimizer.state_dict())
            for step in range(1, 8):
                training.step(*training.draw(step))
            for step in range(8, 11):
                training.step(*training.draw(step))
                bucket_exchanges = training.optimizer._reducer.planned.bucket_exchanges
                assert {bucket_exchange.signature for bucket_exchange in bucket_exchanges} == {
                    "dense FP16Compressor"
                }
                assert all(
                    bucket_exchange.exchange.residual is None
                    for bucket_exchange in bucket_exchanges
                )

    threads(2, program)


def sparse_rows(value: float, *rows: int) -> torch.Tensor:
    shape = SHAPES["matrix"]
    values = torch.full((len(rows), shape[1]), value).double()
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("missing", [[], [2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("joins", [False, True])
def test_a_gradient_that_turns_sparse_takes_along_what_was_held_back(
    threads, dimensions, missing, joins
):
    """Also if a rank then has no gradient, or has joined."""

    def program(transport: LocalTransport) -> list[Seen]:
        training, rank = Training(transport), transport.rank
        with world.entered(transport) as here:
            training.distribute(Compression.gtopk(0.1))
            for step in range(3):
                training.step(*training.draw(step))
            looks = [training.seen()]
            training.step(sparse_rows(torch.nan, 3), None)
            assert training.optimizer.skipped_steps == 1
            looks.append(training.seen())
            training.distribute(Compression.gtopk(0.1), training.optimizer.state_dict())
            training.step(sparse_rows(torch.nan, 4), None)
            looks.append(training.seen())
            if not (joins and rank == 2):
                own = sparse_rows(1.0, rank, 5).to_dense().to_sparse(dimensions)
                training.step(None if rank in missing else own, training.draw(3)[1])
            here.engine.join().wait()
            looks.append(training.seen())
            return looks

    ranks = threads(3, program)
    check_nothing_is_lost(ranks)
    matrix = slice(math.prod(SHAPES["matrix"]))
    for rank, (dense, skipped, loaded, after) in enumerate(ranks):
        assert dense.held[matrix].any() == (rank != GIVES_NOTHING)
        assert torch.equal(dense.held, skipped.held)
        assert torch.equal(dense.held, loaded.held)
        assert not after.held[matrix].any()


def test_what_a_sparse_lane_holds_back_waits_while_its_parameter_is_frozen(threads):
    def program(transport: LocalTransport) -> list[Seen]:
        training = Training(transport)
        with world.entered(transport):
            training.distribute(Compression.gtopk(0.1))
            for step in range(3):
                training.step(*training.draw(step))
            training.step(sparse_rows(torch.nan, 3), None)
            training.model["matrix"].grad = None
            training.model["matrix"].requires_grad_(False)
            training.step(None, training.draw(3)[1])
            looks = [training.seen()]
            training.model["matrix"].requires_grad_(True)
            training.step(sparse_rows(1.0, 4), None)
            return [*looks, training.seen()]

    check_nothing_is_lost(threads(3, program))
