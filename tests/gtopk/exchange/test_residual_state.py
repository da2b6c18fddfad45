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
RANK_WITHOUT_GRADIENTS = 1  # this rank has no residual


class Snapshot(NamedTuple):
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
            * (self.rank != RANK_WITHOUT_GRADIENTS)
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

    def snapshot(self) -> Snapshot:
        (own,) = self.optimizer.state_dict()["gtopk"]["held"].values()
        none = {name: {"residual": torch.zeros(shape)} for name, shape in SHAPES.items()}
        held = self.flat((none | own)[name]["residual"] for name in SHAPES)
        return Snapshot(-self.flat(self.model.values()), held, self.given)

    @staticmethod
    def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def check_conservation(ranks: list[list[Snapshot]]) -> None:
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
def test_another_compression_sends_the_loaded_residual(threads, then, joins):
    def program(transport: LocalTransport) -> list[Snapshot]:
        training = Training(transport)
        with world.entered(transport) as here:
            training.distribute(Compression.gtopk(0.1))
            for step in range(3):
                training.step(*training.draw(step))
            training.distribute(then, training.optimizer.state_dict())
            snapshots = [training.snapshot()]
            training.step(torch.full(SHAPES["matrix"], torch.nan).double(), None)
            assert training.optimizer.skipped_steps == 1
            snapshots.append(training.snapshot())
            if not (joins and training.rank == 2):
                training.step(*training.draw(3))
            here.engine.join().wait()
            snapshots.append(training.snapshot())
            for step in range(4, 12):
                training.step(*training.draw(step))
            return [*snapshots, training.snapshot()]

    ranks = threads(3, program)
    # Later steps round to 16 bits, or use a velocity.
    check_conservation(
        ranks if then is Compression.none else [snapshots[:3] for snapshots in ranks]
    )
    for rank, (loaded, skipped, *_) in enumerate(ranks):
        assert torch.equal(loaded.held, skipped.held)
        assert loaded.held.any() == (rank != RANK_WITHOUT_GRADIENTS)
    if isinstance(then, type):
        assert any(snapshots[2].held.any() for snapshots in ranks)  # not sent all at once
        assert not any(snapshots[3].held.any() for snapshots in ranks)


def test_dense_compression_has_no_residual_once_the_loaded_one_is_sent(threads):
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
def test_gradient_that_becomes_sparse_sends_its_residual(threads, dimensions, missing, joins):
    """Also if a rank then has no gradient, or has joined."""

    def program(transport: LocalTransport) -> list[Snapshot]:
        training, rank = Training(transport), transport.rank
        with world.entered(transport) as here:
            training.distribute(Compression.gtopk(0.1))
            for step in range(3):
                training.step(*training.draw(step))
            snapshots = [training.snapshot()]
            training.step(sparse_rows(torch.nan, 3), None)
            assert training.optimizer.skipped_steps == 1
            snapshots.append(training.snapshot())
            training.distribute(Compression.gtopk(0.1), training.optimizer.state_dict())
            training.step(sparse_rows(torch.nan, 4), None)
            snapshots.append(training.snapshot())
            if not (joins and rank == 2):
                own = sparse_rows(1.0, rank, 5).to_dense().to_sparse(dimensions)
                training.step(None if rank in missing else own, training.draw(3)[1])
            here.engine.join().wait()
            snapshots.append(training.snapshot())
            return snapshots

    ranks = threads(3, program)
    check_conservation(ranks)
    matrix = slice(math.prod(SHAPES["matrix"]))
    for rank, (dense, skipped, loaded, after) in enumerate(ranks):
        assert dense.held[matrix].any() == (rank != RANK_WITHOUT_GRADIENTS)
        assert torch.equal(dense.held, skipped.held)
        assert torch.equal(dense.held, loaded.held)
        assert not after.held[matrix].any()


def test_residual_of_a_sparse_gradient_waits_while_its_parameter_is_frozen(threads):
    def program(transport: LocalTransport) -> list[Snapshot]:
        training = Training(transport)
        with world.entered(transport):
            training.distribute(Compression.gtopk(0.1))
            for step in range(3):
                training.step(*training.draw(step))
            training.step(sparse_rows(torch.nan, 3), None)
            training.model["matrix"].grad = None
            training.model["matrix"].requires_grad_(False)
            training.step(None, training.draw(3)[1])
            snapshots = [training.snapshot()]
            training.model["matrix"].requires_grad_(True)
            training.step(sparse_rows(1.0, 4), None)
            return [*snapshots, training.snapshot()]

    check_conservation(threads(3, program))
