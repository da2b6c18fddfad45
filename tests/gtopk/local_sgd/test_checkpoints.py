"""LocalSGD resumes from a checkpoint, with its residual and outer optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging, nesterov
from tests.gtopk.local_rounds import (
    backward,
    close,
    flat,
    held,
    momentum,
    network,
    on_ranks,
    weights,
)


@pytest.mark.parametrize("mid_round", [False, True])
def test_run_resumed_from_a_checkpoint_is_bit_identical(mid_round: bool) -> None:
    def rank(transport: LocalTransport) -> None:
        def begin() -> tuple[torch.nn.Module, Any]:
            model = network()
            compression = hvd.Compression.gtopk(density=0.1)
            inner = torch.optim.Adam(model.parameters(), lr=0.01)
            return model, LocalSGD(inner, 3, nesterov, compression)

        def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
            for step in steps:
                backward(model, transport.rank, step)
                optimizer.step()

        model, optimizer = begin()
        stop = 7 if mid_round else 6
        train(model, optimizer, range(stop))
        saved = model.state_dict(), optimizer.state_dict()
        assert bool(saved[1]["local_sgd"]["center"]) == mid_round
        saved = torch.utils._pytree.tree_map(
            lambda part: part.clone() if isinstance(part, torch.Tensor) else part, saved
        )
        train(model, optimizer, range(stop, 12))
        other, resumed = begin()
        train(other, resumed, range(2))  # loading discards this
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(other, resumed, range(stop, 12))
        assert torch.equal(weights(other), weights(model))
        assert torch.equal(held(resumed), held(optimizer))
        assert resumed.outer_steps == 4

    on_ranks(3, rank)


@pytest.mark.parametrize(
    "compression",
    [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.topk(density=0.1)],
    ids=repr,
)
def test_another_compression_sends_the_loaded_residual(compression: Any) -> None:
    """Also if a rank has no residual; it is saved until it is sent."""

    def rank(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        model = network()
        sparse = LocalSGD(
            momentum(model.parameters()), 1, averaging, hvd.Compression.gtopk(density=0.1)
        )
        backward(model, transport.rank, 0)
        sparse.step()
        state = sparse.state_dict()
        if transport.rank == 1:
            state["gtopk"]["held"] = {1: {}}
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging, compression)
        optimizer.load_state_dict(state)
        z, before = weights(model), held(optimizer)
        backward(model, transport.rank, 1)
        optimizer.step()
        assert bool(before.any()) == (transport.rank != 1)
        assert not (held(optimizer) - before).any()
        again = LocalSGD(momentum(model.parameters()), None, averaging, compression)
        again.load_state_dict(optimizer.state_dict())
        pseudo = z - weights(model)
        assert again.outer_step()
        assert again._fragments.first._bucket_exchange.exchange.residual is None or isinstance(
            compression, hvd.Compression.topk
        )
        return z - weights(model), held(again), pseudo / 3 + before

    moved, after, given = zip(*on_ranks(3, rank), strict=True)
    close(moved[0] + sum(after), sum(given))


def test_loaded_residual_of_another_shard_is_sent() -> None:
    compression = hvd.Compression.hierarchical(density=0.1, inside="dense", node_size=2)
    states: dict[int, Any] = {}

    def rank(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging, compression)
        for step in range(2):
            backward(model, transport.rank, step)
            optimizer.step()
            optimizer.outer_step()
        states[transport.rank] = state = optimizer.state_dict()
        transport.barrier()
        others = states[1 - transport.rank]["gtopk"]["held"][1 - transport.rank]
        state["gtopk"]["held"] = {transport.rank: others}
        optimizer.load_state_dict(state)
        z, before = weights(model), held(optimizer)
        backward(model, transport.rank, 2)
        optimizer.step()
        pseudo = z - weights(model)
        assert optimizer.outer_step()
        return z - weights(model), held(optimizer), pseudo / 2 + before

    moved, after, given = zip(*on_ranks(2, rank), strict=True)
    close(moved[0] + sum(after), sum(given))
    lies = [[bool(half.any()) for half in one.tensor_split(2)] for one in after]
    assert lies == [[True, False], [False, True]]


def test_other_rank_count_keeps_the_residuals_sum_and_restarts_the_round() -> None:
    def saving(transport: LocalTransport) -> tuple[torch.Tensor, Any, Any]:
        model = network()
        optimizer = LocalSGD(
            momentum(model.parameters()), 2, nesterov, hvd.Compression.gtopk(density=0.1)
        )
        for step in range(5):
            backward(model, transport.rank, step)
            if step == 4:
                center = weights(model)
            optimizer.step()
        return center, model.state_dict(), optimizer.state_dict()

    center, models, states = zip(*on_ranks(3, saving), strict=True)
    together = {rank: part for state in states for rank, part in state["gtopk"]["held"].items()}
    total = sum(flat(part["residual"] for part in one.values()) for one in together.values())
    assert bool(total.any())

    def loading(transport: LocalTransport) -> torch.Tensor:
        model = network()
        optimizer = LocalSGD(
            momentum(model.parameters()), 2, nesterov, hvd.Compression.gtopk(density=0.1)
        )
        model.load_state_dict(models[0])
        part = {**states[0]["gtopk"], "held": together}
        optimizer.load_state_dict({**states[0], "gtopk": part})
        assert torch.equal(weights(model), center[0])
        assert optimizer.steps_made == 0
        return held(optimizer)

    close(sum(on_ranks(2, loading)), total)


def test_residuals_of_unknown_names_are_kept_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(transport: LocalTransport) -> None:
        def begin(prefix: str) -> Any:
            model = network()
            optimizer = LocalSGD(
                momentum(model.parameters()),
                1,
                compression=hvd.Compression.gtopk(density=0.1),
                named_parameters=[(prefix + name, p) for name, p in model.named_parameters()],
            )
            return model, optimizer

        model, optimizer = begin("")
        for step in range(2):
            backward(model, transport.rank, step)
            optimizer.step()
        assert bool(held(optimizer).any())
        _, compiled = begin("_orig_mod.")
        compiled.load_state_dict(optimizer.state_dict())
        assert torch.equal(held(compiled), held(optimizer))
        assert "cannot be applied" not in caplog.text
        transport.barrier()
        _, other = begin("other.")
        other.load_state_dict(optimizer.state_dict())
        _, again = begin("")
        again.load_state_dict(other.state_dict())
        assert torch.equal(held(again), held(optimizer))
        assert caplog.text.count(f"rank {transport.rank}: residuals for") == 1

    on_ranks(2, rank)
    assert "rank 1: residuals for '0.bias', '0.weight', '2.bias', '2.weight'" in caplog.text


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.gtopk(0.1)])
@pytest.mark.parametrize("changes_first", [True, False])
def test_gradient_and_change_residuals_are_not_interchanged(
    changes_first: bool, compression: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sparse = hvd.Compression.gtopk(0.1)

    def local(optimizer: Any, compression: Any) -> Any:
        return LocalSGD(optimizer, 2, averaging, compression)

    def every_step(optimizer: Any, compression: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, compression=compression)

    first, then = (local, every_step) if changes_first else (every_step, local)

    def program(transport: LocalTransport) -> bool:
        model = network()
        optimizer = first(momentum(model.parameters()), sparse)
        for step in range(2):
            backward(model, transport.rank, step)
            optimizer.step()
        assert held(optimizer).any()
        state = optimizer.state_dict()
        optimizer = then(torch.optim.SGD(model.parameters(), lr=0.0), compression)
        optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
        before = weights(model)
        for _ in range(2):
            model.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return torch.equal(before, weights(model)) and not held(optimizer).any()

    assert on_ranks(2, program) == [True, True]
    messages = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
    assert len(messages) == 2
    assert all("has no residual" in text for text in messages)


def test_old_state_without_holds_keeps_its_residual() -> None:
    def rank(transport: LocalTransport) -> None:
        def begin() -> Any:
            model = network()
            return model, LocalSGD(
                momentum(model.parameters()), 2, averaging, hvd.Compression.gtopk(density=0.1)
            )

        model, optimizer = begin()
        for step in range(4):
            backward(model, transport.rank, step)
            optimizer.step()
        state = optimizer.state_dict()
        del state["gtopk"]["holds"]
        _, resumed = begin()
        resumed.load_state_dict(state)
        assert held(resumed).any()
        assert torch.equal(held(resumed), held(optimizer))

    on_ranks(2, rank)


def test_state_without_the_outer_optimizers_state_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 1, nesterov)
        optimizer.load_state_dict(momentum(model.parameters()).state_dict())
        assert "outer optimizer's state (its momentum) and the number of outer" in caplog.text
        caplog.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert not caplog.text

    on_ranks(1, rank)


@pytest.mark.parametrize("is_shared", [True, False])
def test_outer_optimizer_state_loaded_on_rank_0_must_be_broadcast(is_shared: bool) -> None:
    """Only rank 0 loads the checkpoint, as in Horovod's scripts."""

    def program(transport: LocalTransport) -> Any:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 1)
        for step in range(2):
            backward(model, transport.rank, step)
            optimizer.step()
        state, trained = optimizer.state_dict(), model.state_dict()
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 1)
        if transport.rank == 0:
            model.load_state_dict(trained)
            optimizer.load_state_dict(state)
        hvd.broadcast_parameters(model.state_dict(), 0)
        if is_shared:
            hvd.broadcast_optimizer_state(optimizer, 0)
        backward(model, transport.rank, 2)
        if not is_shared:
            with pytest.raises(hvd.HorovodInternalError, match="state of the outer optimizer"):
                optimizer.step()
            return None
        optimizer.step()
        return weights(model)

    ours, others = on_ranks(2, program)
    assert not is_shared or torch.equal(ours, others)


@pytest.mark.parametrize("steps", [8, 9])
@pytest.mark.parametrize(
    "compression",
    [
        hvd.Compression.gtopk(density=0.1),
        hvd.Compression.gtopk(density=0.1, warmup_steps=6),
        hvd.Compression.oktopk(density=0.1),
    ],
    ids=repr,
)
def test_all_ranks_continue_from_the_round_that_rank_0_loads(compression: Any, steps: int) -> None:
    """Between rounds, when only the model is shared, and in the middle of a round."""

    def begin() -> tuple[torch.nn.Module, Any]:
        model = network()
        return model, LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.1), 2, averaging, compression
        )

    def train(rank: int, model: torch.nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            backward(model, rank, step)
            optimizer.step()

    def first(transport: LocalTransport) -> tuple[Any, Any]:
        model, optimizer = begin()
        train(transport.rank, model, optimizer, range(steps))
        return model.state_dict(), optimizer.state_dict()

    saved = on_ranks(2, first)[0]

    def then(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = begin()
        if transport.rank == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        hvd.broadcast_parameters(model.state_dict(), 0)
        if steps % 2:
            hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.steps_made == steps % 2
        train(transport.rank, model, optimizer, range(steps, 12))
        assert (optimizer.outer_steps, optimizer.state_dict()["gtopk"]["steps"]) == (6, 6)
        return weights(model)

    ours, others = on_ranks(2, then)
    assert torch.equal(ours, others)
