"""Shards in an optimizer: owner errors are saved, redistributed, and undone with the step.

test_distributed and test_adamw check the laws of all methods.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.adaptive.replica import RoundExchange
from gtopk.compression import Compression, ErrorFeedback
from gtopk.local_sgd import LocalSGD
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, flat, inputs, layers, take_steps
from tests.gtopk.held import held
from tests.gtopk.in_shards import _small_blocks

__all__ = ["_small_blocks"]

SHARDS = Compression.shards(3, 2)


@pytest.fixture(autouse=True)
def _in_small_blocks(_small_blocks: None) -> None:
    """Use small blocks, so that a small model fills every shard."""


def owner_errors(optimizer: Any) -> np.ndarray:
    residuals, _ = optimizer._reducer.export_state()
    return np.concatenate([parts["owner_error"].numpy().ravel() for parts in residuals.values()])


def take_step(model: Any, optimizer: Any, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's gradient, and the update."""
    model(inputs(rank, 5)).square().sum().backward()
    gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    optimizer.synchronize()
    update = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    with optimizer.skip_synchronize():
        optimizer.step()
    return gradient, update


def saved(ranks: int, compression: Any = SHARDS, steps: int = 5) -> tuple[list[Any], Any, Any]:
    """Return the ranks' optimizers after some steps, their merged state, and the model's."""
    models = [layers() for _ in range(ranks)]

    def program(transport: LocalTransport) -> tuple[Any, Any]:
        model = models[transport.rank]
        with world.entered(transport):
            optimizer = distribute(model, compression)
            take_steps(model, optimizer, transport.rank, range(steps))
            return optimizer, optimizer.gather_state(0)

    optimizers, states = zip(*run_ranks(local_world(ranks, 30), program), strict=True)
    return list(optimizers), states[0], models[0].state_dict()


def test_owner_errors_lie_on_one_rank_per_entry() -> None:
    optimizers, _, _ = saved(4)
    errors = np.array([owner_errors(optimizer) != 0 for optimizer in optimizers])
    assert (errors.sum(0) <= 1).all()
    assert errors.any(1).all()


def test_run_resumed_on_as_many_ranks_is_bit_identical() -> None:
    _, state, model_state = saved(3)

    def resume(transport: LocalTransport) -> tuple[bytes, bytes]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, SHARDS)
            model.load_state_dict(model_state)
            optimizer.load_state_dict(state)
            take_steps(model, optimizer, transport.rank, range(5, 9))
            return flat(model).numpy().tobytes(), held(optimizer).tobytes()

    def uninterrupted(transport: LocalTransport) -> tuple[bytes, bytes]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, SHARDS)
            take_steps(model, optimizer, transport.rank, range(9))
            return flat(model).numpy().tobytes(), held(optimizer).tobytes()

    resumed, without_stop = (
        run_ranks(local_world(3, 30), each) for each in (resume, uninterrupted)
    )
    assert resumed == without_stop


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_other_rank_counts_redistribute_owner_errors_without_loss(ranks: int) -> None:
    optimizers, state, model_state = saved(3)
    left = sum(held(optimizer) for optimizer in optimizers)
    assert sum(np.abs(owner_errors(optimizer)).sum() for optimizer in optimizers) > 0

    def program(transport: LocalTransport) -> tuple[np.ndarray, ...]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, SHARDS)
            model.load_state_dict(model_state)
            optimizer.load_state_dict(state)
            before = held(optimizer)
            gradient, update = take_step(model, optimizer, transport.rank)
            return before, gradient / ranks, update, held(optimizer), owner_errors(optimizer)

    each = zip(*run_ranks(local_world(ranks, 30), program), strict=True)
    before, added, updates, after, errors = map(np.array, each)
    np.testing.assert_allclose(before.sum(0), left, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        updates[0] + after.sum(0), before.sum(0) + added.sum(0), rtol=0, atol=1e-12
    )
    assert ((errors != 0).sum(0) <= 1).all()


@pytest.mark.parametrize(
    "compression", [Compression.gtopk(0.3), Compression.topk(1.0), Compression.none], ids=repr
)
def test_another_compression_takes_owner_errors_as_residual(compression: Any) -> None:
    optimizers, state, model_state = saved(3)
    left = sum(held(optimizer) for optimizer in optimizers)

    def program(transport: LocalTransport) -> tuple[np.ndarray, ...]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            model.load_state_dict(model_state)
            optimizer.load_state_dict(state)
            gradient, update = take_step(model, optimizer, transport.rank)
            return gradient / 3, update, held(optimizer)

    each = zip(*run_ranks(local_world(3, 30), program), strict=True)
    added, updates, after = map(np.array, each)
    is_feedback = isinstance(compression, ErrorFeedback)
    atol = 1e-12 if is_feedback else 1e-9
    np.testing.assert_allclose(updates[0] + after.sum(0), left + added.sum(0), rtol=0, atol=atol)


def test_skipped_step_leaves_residuals_owner_errors_and_parameters() -> None:
    def program(transport: LocalTransport) -> tuple[bytes, bool]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, SHARDS)
            take_steps(model, optimizer, transport.rank, range(4))
            before = held(optimizer), owner_errors(optimizer), flat(model)
            optimizer.zero_grad()
            model(inputs(transport.rank, 4)).square().sum().backward()
            if transport.rank == 1:
                for parameter in model.parameters():
                    parameter.grad.view(-1)[-1] = float("nan")
            optimizer.step()
            assert optimizer.last_step.skipped
            after = held(optimizer), owner_errors(optimizer), flat(model)
            for old, new in zip(before, after, strict=True):
                assert old.tobytes() == new.tobytes() if isinstance(old, np.ndarray) else True
            assert torch.equal(before[2], after[2])
            take_steps(model, optimizer, transport.rank, range(5, 7))
            return flat(model).numpy().tobytes(), optimizer.last_step.skipped

    ranks = run_ranks(local_world(3, 30), program)
    assert len({model for model, _ in ranks}) == 1
    assert not any(skipped for _, skipped in ranks)


def test_residual_that_overflows_outside_the_shard_skips_the_step() -> None:
    def program(transport: LocalTransport) -> tuple[list[bool], np.ndarray]:
        parameter = torch.nn.Parameter(torch.zeros(32))
        model = torch.nn.ParameterList([parameter])
        with world.entered(transport):
            optimizer = distribute(model, Compression.shards(4, 32))
            skipped = []
            for step in range(6):
                parameter.grad = torch.zeros(32)
                parameter.grad[-1] = 3.4e38 * (transport.rank == 0 and step < 3)
                optimizer.step()
                skipped.append(optimizer.last_step.skipped)
            return skipped, held(optimizer)

    for skipped, left in run_ranks(local_world(2, 30), program):
        assert skipped == [False, False, True, False, False, False]
        assert np.isfinite(left).all()


def test_shards_are_exchanged_within_a_process_set_only(threads: Any) -> None:
    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, alone = layers(), layers()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        with world.entered(transport):
            pair = hvd.add_process_set([0, 2])
            optimizer = distribute(model, SHARDS, process_set=pair)
            for step in range(3):
                for each, of in ((optimizer, model), (plain, alone)):
                    each.zero_grad()
                    of(inputs(transport.rank, step)).square().sum().backward()
                    each.step()
        return flat(model), flat(alone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        first, other, last = threads(3, program)
    assert torch.equal(*other)
    assert torch.equal(first[0], last[0])
    assert not torch.equal(*first)


def test_ranks_without_batches_may_join(threads: Any) -> None:
    def program(transport: LocalTransport) -> tuple[torch.Tensor, np.ndarray]:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model, SHARDS, missing_gradients="zeros")
            take_steps(model, optimizer, transport.rank, range([6, 3, 4][transport.rank]))
            here.engine.join().wait()
            return flat(model), held(optimizer)

    ranks = threads(3, program)
    assert torch.isfinite(ranks[0][0]).all()


def test_local_sgd_in_shards_conserves_the_change() -> None:
    def program(transport: LocalTransport) -> list[tuple[np.ndarray, ...]]:
        model, rounds = layers().double(), []
        with world.entered(transport):
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = LocalSGD(inner, 2, lambda p: torch.optim.SGD(p, lr=1.0), SHARDS)
            center = flat(model)
            for step in range(8):
                optimizer.zero_grad()
                model(inputs(transport.rank, step).double()).square().sum().backward()
                if step % 2:
                    before = _unsent(optimizer)
                    alone = flat(model)
                    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                    change = center - (alone - 0.05 * gradient)
                    optimizer.step()
                    moved = center - flat(model)
                    center = flat(model)
                    rounds.append((before, change.numpy() / 3, moved.numpy(), _unsent(optimizer)))
                else:
                    optimizer.step()
        return rounds

    for ranks in zip(*run_ranks(local_world(3, 30), program), strict=True):
        before, added, moved, after = (np.array(each) for each in zip(*ranks, strict=True))
        assert (moved == moved[0]).all()
        np.testing.assert_allclose(
            moved[0] + after.sum(0), before.sum(0) + added.sum(0), rtol=0, atol=1e-12
        )


def _unsent(optimizer: Any) -> np.ndarray:
    """Return the residual and the owner errors of local steps."""
    (parts,) = optimizer.state_dict()["gtopk"]["held"].values()
    found = [
        sum(tensors[what].numpy() for what in ("residual", "owner_error")).ravel()
        for tensors in parts.values()
    ]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"period": 0}, ValueError, "period must be at least 1, got 0"),
        ({"period": 2.0}, TypeError, r"period must be an integer, got 2\.0"),
        ({"bits": 5}, ValueError, "bits must be one of 2, 3, 4, 8, 16, 32; got 5"),
        ({"bits": True}, ValueError, "bits must be one of 2, 3, 4, 8, 16, 32; got True"),
        ({"density": 0.1}, TypeError, "density"),
        ({"wire": "raw"}, TypeError, "wire"),
    ],
)
def test_invalid_shards_option_raises(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        Compression.shards(**options)


def test_round_exchange_refuses_shards() -> None:
    parameter = torch.nn.Parameter(torch.zeros(9))
    with pytest.raises(ValueError, match="only with mode 'balanced' of adapt"):
        RoundExchange([parameter], SHARDS)


def test_unequal_bits_of_shards_raise_and_name_both(threads: Any) -> None:
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, Compression.shards(3, 2 + transport.rank))
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 0: bits=2; rank 1: bits=3"):
                take_steps(model, optimizer, transport.rank, range(1))

    threads(2, program)
