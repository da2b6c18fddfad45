"""LocalSGD: rounds of local steps and one exchange; DiLoCo where it is dense."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk import world
from gtopk.local_sgd import LocalSGD, averaging, nesterov

RANKS = (1, 2, 3, 5)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def network() -> torch.nn.Module:
    # A generator of its own: the global one is shared by the threads that are ranks here.
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    for parameter in model.double().parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def backward(model: torch.nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    model.zero_grad()
    model(x).square().mean().backward()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def weights(model: torch.nn.Module) -> torch.Tensor:
    return flat(model.parameters())


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def on_ranks(size: int, program: Callable[[LocalTransport], Any]) -> list[Any]:
    """Run a program on ranks that are threads, each in the world of its transport."""

    def rank(transport: LocalTransport) -> Any:
        with world.entered(transport):
            return program(transport)

    return run_ranks(local_world(size, timeout_seconds=20), rank)


def held(optimizer: Any) -> torch.Tensor:
    """Return the residual of this rank, in the order of the parameters; 0 where there is none."""
    (own,) = optimizer.state_dict()["gtopk"]["held"].values()
    return flat(part["residual"] for part in own.values()) if own else torch.zeros(())


def diloco(ranks: int, rounds: int, steps: int, outer: Callable[[Any], Any]) -> torch.Tensor:
    """Return the weights that algorithm 1 of DiLoCo comes to, written out in one process."""
    center, models = network(), [network() for _ in range(ranks)]
    inner = [momentum(model.parameters()) for model in models]
    outside = outer(list(center.parameters()))
    for turn in range(rounds):
        for rank, model in enumerate(models):
            for step in range(steps):
                backward(model, rank, turn * steps + step)
                inner[rank].step()
        replicas = zip(*(model.parameters() for model in models), strict=True)
        for z, xs in zip(center.parameters(), replicas, strict=True):
            z.grad = torch.stack([z.detach() - x.detach() for x in xs]).mean(0)
        outside.step()
        for model in models:
            model.load_state_dict(center.state_dict())
    return weights(center)


@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.gtopk(density=1.0)], ids=repr
)
@pytest.mark.parametrize(("steps", "outer"), [(1, averaging), (3, nesterov)])
def test_keeping_everything_is_diloco_and_one_step_the_mean_of_the_models(
    steps: int, outer: Any, compression: Any
) -> None:
    for size in RANKS:

        def rank(transport: LocalTransport, size: int = size) -> None:
            model = network()
            optimizer = LocalSGD(momentum(model.parameters()), steps, outer, compression)
            for step in range(3 * steps):
                backward(model, transport.rank, step)
                optimizer.step()
            assert optimizer.outer_steps == 3
            close(weights(model), diloco(size, 3, steps, outer))

        on_ranks(size, rank)


@pytest.mark.parametrize(
    "compression",
    [
        hvd.Compression.gtopk(density=0.1),
        hvd.Compression.topk(density=0.1, values="int8"),
        hvd.Compression.oktopk(density=0.1),
    ],
    ids=repr,
)
def test_nothing_is_lost_and_the_replicas_are_one_after_a_round(compression: Any) -> None:
    def rank(transport: LocalTransport) -> list[tuple[torch.Tensor, ...]]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging, compression)
        seen = []
        for turn in range(4):
            steps = 1 + (transport.rank + turn) % 3  # not alike
            z, before = weights(model), held(optimizer)
            for step in range(steps):
                backward(model, transport.rank, 10 * turn + step)
                optimizer.step()
            pseudo = z - weights(model)
            assert optimizer.outer_step()
            seen.append((z, weights(model), steps * pseudo, before, held(optimizer), steps))
        return seen

    for size in RANKS:
        for turn in zip(*on_ranks(size, rank), strict=True):
            z, after, pseudo, e, e_after, steps = zip(*turn, strict=True)
            assert all(torch.equal(one, after[0]) for one in after)
            mean = sum(pseudo) / sum(steps)
            close(z[0] - after[0] + sum(e_after), sum(e) + mean)


def test_a_rank_without_a_step_weighs_nothing() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging)
        assert not optimizer.outer_step()  # nobody has made one
        assert torch.equal(weights(model), weights(network()))
        if transport.rank == 1:
            backward(model, 1, 0)
            optimizer.step()
        own = weights(model)
        assert optimizer.outer_step()
        return own, weights(model)

    outcomes = on_ranks(3, rank)
    for _, after in outcomes:
        close(after, outcomes[1][0])


@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.gtopk(density=0.2)], ids=repr
)
def test_a_replica_that_is_not_finite_becomes_the_others_model(
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
            for mine, other in zip(copy.parameters(), model.parameters(), strict=True):
                mine -= 0.1 * other.grad
        optimizer.step()
        assert (optimizer.lost_replicas, optimizer.skipped_steps) == (1, 0)
        assert bool(optimizer.state) == (transport.rank != 1)  # momentum that is NaN is no use
        seen = z, weights(model), weights(copy), held(optimizer)
        model[0].weight.grad.fill_(float("inf"))  # on all ranks: nothing is left to go on with
        with pytest.raises(FloatingPointError, match="2 outer steps in a row"):
            optimizer.step()
        assert torch.equal(weights(model), seen[1])
        assert torch.equal(held(optimizer), seen[3])
        assert (optimizer.lost_replicas, optimizer.skipped_steps) == (4, 1)
        return seen

    with caplog.at_level(logging.WARNING, "gtopk"):
        z, after, own, e = zip(*on_ranks(3, rank), strict=True)
    assert all(torch.equal(one, after[0]) for one in after)
    close(z[0] - after[0] + sum(e), ((z[0] - own[0]) + (z[0] - own[2])) / 2)
    assert "goes on without rank 1: a replica is not finite on rank 1: '2.bias'" in caplog.text
    assert "changes nothing" in caplog.text


def test_a_sum_that_overflows_moves_nothing_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        start = weights(model)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = LocalSGD(inner, 1, compression=hvd.Compression.fp16, max_skipped_steps=1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e6)  # more than float16 can say
        optimizer.step()
        assert torch.equal(weights(model), start)
        assert (optimizer.outer_steps, optimizer.skipped_steps) == (1, 1)
        assert optimizer.last_step.skipped
        with pytest.raises(FloatingPointError, match="the sum of replicas overflowed"):
            optimizer.step()

    with caplog.at_level(logging.WARNING, "gtopk"):
        on_ranks(2, rank)
    assert "changes nothing: the sum of replicas overflowed" in caplog.text


def test_a_sum_that_overflows_leaves_no_trace_in_what_is_held_back() -> None:
    def rank(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = LocalSGD(
            torch.optim.SGD([parameter], lr=1.0),
            1,
            outer=partial(torch.optim.SGD, lr=1.0),
            compression=hvd.Compression.gtopk(0.5),
        )
        moved = []
        for gradient in ([3e38, 2.9e38], [0.0, 2.9e38], [0.0, 0.0]):
            parameter.grad = torch.tensor(gradient)
            before = held(optimizer) if moved else None
            optimizer.step()
            moved.append(not optimizer.last_step.skipped)
            if not moved[-1]:
                assert torch.equal(held(optimizer), before)
        assert moved == [True, False, True]
        assert torch.equal(parameter.detach(), torch.tensor([-3e38, -2.9e38]))

    on_ranks(2, rank)


@pytest.mark.parametrize("mid_round", [False, True])
def test_a_checkpoint_goes_on_to_the_bit(mid_round: bool) -> None:
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
        train(other, resumed, range(2))  # what it did before is forgotten
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(other, resumed, range(stop, 12))
        assert torch.equal(weights(other), weights(model))
        assert torch.equal(held(resumed), held(optimizer))
        assert resumed.outer_steps == 4

    on_ranks(3, rank)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_round_ends_that_is_longer_already_than_rounds_are_now(loaded: bool) -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 8)
        for step in range(6):
            backward(model, transport.rank, step)
            optimizer.step()
        if loaded:
            saved, optimizer = optimizer.state_dict(), LocalSGD(momentum(model.parameters()), 4)
            optimizer.load_state_dict(saved)
        optimizer.inner_steps = 4
        ended = []
        for step in range(6, 15):
            backward(model, transport.rank, step)
            optimizer.step()
            ended.append(optimizer.steps_made == 0)
        assert ended == [True, *[False, False, False, True] * 2]

    on_ranks(2, rank)


def test_a_round_whose_exchange_has_failed_ends_with_the_next_step() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2)
        (group,) = optimizer.outer.param_groups
        backward(model, transport.rank, 0)
        optimizer.step()
        rate, group["lr"] = group["lr"], 1.0 + transport.rank  # not alike
        backward(model, transport.rank, 1)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1: outer SGD"):
            optimizer.step()
        group["lr"] = rate
        backward(model, transport.rank, 2)
        optimizer.step()
        assert (optimizer.outer_steps, optimizer.steps_made) == (1, 0)

    on_ranks(2, rank)


@pytest.mark.parametrize(
    "then",
    [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.topk(density=0.1)],
    ids=repr,
)
def test_another_compression_goes_on_from_what_was_held_back(then: Any) -> None:
    """Also where a rank holds nothing back; it is saved as long as it is not sent."""

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
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging, then)
        optimizer.load_state_dict(state)
        z, before = weights(model), held(optimizer)
        backward(model, transport.rank, 1)
        optimizer.step()
        assert bool(before.any()) == (transport.rank != 1)
        assert not (held(optimizer) - before).any()
        again = LocalSGD(momentum(model.parameters()), None, averaging, then)
        again.load_state_dict(optimizer.state_dict())
        pseudo = z - weights(model)
        assert again.outer_step()
        assert again._exchange._lane.exchange.residual is None or isinstance(
            then, hvd.Compression.topk
        )
        return z - weights(model), held(again), pseudo / 3 + before

    moved, after, given = zip(*on_ranks(3, rank), strict=True)
    close(moved[0] + sum(after), sum(given))


def test_on_other_ranks_the_sum_of_the_residuals_stays_and_a_round_begins_anew() -> None:
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


def test_what_is_held_back_of_other_names_is_kept_and_told(
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
        assert "cannot be sent" not in caplog.text
        transport.barrier()
        _, other = begin("other.")
        other.load_state_dict(optimizer.state_dict())
        _, again = begin("")
        again.load_state_dict(other.state_dict())
        assert torch.equal(held(again), held(optimizer))
        assert caplog.text.count(f"rank {transport.rank}: what is held back of") == 1

    on_ranks(2, rank)
    assert "rank 1: what is held back of '0.bias', '0.weight', '2.bias', '2.weight'" in caplog.text


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.gtopk(0.1)])
@pytest.mark.parametrize("changes_first", [True, False])
def test_gradients_that_are_held_back_are_no_changes_of_the_model(
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
    said = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
    assert len(said) == 2
    assert all("holds back nothing" in text for text in said)


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_outer_optimizers_state_is_shared_or_missed(is_shared: bool) -> None:
    """Rank 0 alone goes on from a checkpoint, as Horovod's scripts do."""

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


def test_ranks_that_disagree_or_begin_apart_hear_of_it() -> None:
    def disagree(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2 + transport.rank)
        backward(model, 0, 0)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1: inner_steps=3"):
            optimizer.step()

    def apart(transport: LocalTransport) -> None:
        model = network()
        with torch.no_grad():
            model[2].bias += transport.rank
        optimizer = LocalSGD(
            momentum(model.parameters()), 2, named_parameters=model.named_parameters()
        )
        backward(model, 0, 0)
        with pytest.raises(hvd.HorovodInternalError, match=r"'2\.bias' has the checksums"):
            optimizer.step()

    for program in (disagree, apart):
        on_ranks(2, program)


def test_a_failed_exchange_leaves_replica_residual_and_gradients_as_they_were() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(
            momentum(model.parameters()), None, nesterov, hvd.Compression.gtopk(density=0.1)
        )
        for step in range(2):
            backward(model, transport.rank, step)
            optimizer.step()
        assert optimizer.outer_step()
        backward(model, transport.rank, 2)
        optimizer.step()
        if transport.rank == 1:
            return  # its program ends
        before, e, gradients = weights(model), held(optimizer), [p.grad for p in model.parameters()]
        with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
            optimizer.outer_step()
        assert torch.equal(weights(model), before)
        assert torch.equal(held(optimizer), e)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))

    on_ranks(3, rank)


def test_it_is_the_optimizer_it_wraps_and_its_rate_can_be_scheduled_inside_and_outside() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        inner = momentum(model.parameters())
        optimizer = gtopk.LocalSGD(inner, inner_steps=2)
        assert isinstance(optimizer, torch.optim.SGD)
        inside = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        outside = torch.optim.lr_scheduler.StepLR(optimizer.outer, 1, gamma=0.5)
        for step in range(4):
            backward(model, transport.rank, step)
            optimizer.step()
            inside.step()
        outside.step()
        assert inner.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
        assert optimizer.outer.param_groups[0]["lr"] == pytest.approx(0.35)
        assert optimizer.last_step.sent_bytes > 0
        assert not optimizer.last_step.skipped

    on_ranks(2, rank)


def test_parameters_that_are_trained_later_are_refused() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        model[0].requires_grad_(False)
        optimizer = LocalSGD(momentum(model.parameters()), 1)
        backward(model, transport.rank, 0)
        optimizer.step()
        model[0].requires_grad_(True)
        backward(model, transport.rank, 1)
        with pytest.raises(ValueError, match="now others do, too: number 0 of group 0"):
            optimizer.step()

    on_ranks(1, rank)


def test_momentum_is_outside_where_nothing_comes_late() -> None:
    def rank(transport: LocalTransport) -> None:
        for compression, said in (
            (hvd.Compression.fp16, (0.7, 0.9)),
            (hvd.Compression.gtopk(density=0.1), (1.0, 0.0)),
        ):
            optimizer = LocalSGD(momentum(network().parameters()), 1, compression=compression)
            (group,) = optimizer.outer.param_groups
            assert (group["lr"], group["momentum"]) == said

    on_ranks(1, rank)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1, or None"),
        ({"inner_steps": 2.5}, "inner_steps must be an integer"),
        ({"compression": hvd.Compression.gtopk(dense_vectors=True)}, "dense parameters"),
        ({"compression": hvd.Compression.auto(hide_behind_backward=True)}, "bytes_per_step="),
        ({"compression": "gtopk"}, "compression must be"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    def rank(transport: LocalTransport) -> None:
        with pytest.raises((TypeError, ValueError), match=said):
            LocalSGD(momentum(network().parameters()), **{"inner_steps": 1, **options})

    on_ranks(1, rank)


def test_real_ranks_train_save_and_go_on(mpirun: Any, tmp_path: Any) -> None:
    job = mpirun(2, "local_sgd.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("local steps, one model") == 2
