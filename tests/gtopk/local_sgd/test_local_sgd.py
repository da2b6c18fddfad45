"""LocalSGD: rounds of local steps and one exchange; with dense exchanges, DiLoCo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging, nesterov
from gtopk.telemetry.reading import read_run
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

RANKS = (1, 2, 3, 5)


def diloco(ranks: int, rounds: int, steps: int, outer: Callable[[Any], Any]) -> torch.Tensor:
    """Return the weights after DiLoCo's algorithm 1, implemented in one process."""
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
def test_density_1_equals_diloco(steps: int, outer: Any, compression: Any) -> None:
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
        hvd.Compression.gtopk(density=0.1, values="int3"),
        hvd.Compression.oktopk(density=0.1),
    ],
    ids=repr,
)
def test_change_is_conserved_and_replicas_are_equal_after_a_round(compression: Any) -> None:
    def rank(transport: LocalTransport) -> list[tuple[torch.Tensor, ...]]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging, compression)
        rounds = []
        for turn in range(4):
            steps = 1 + (transport.rank + turn) % 3  # unequal
            z, before = weights(model), held(optimizer)
            for step in range(steps):
                backward(model, transport.rank, 10 * turn + step)
                optimizer.step()
            pseudo = z - weights(model)
            assert optimizer.outer_step()
            rounds.append((z, weights(model), steps * pseudo, before, held(optimizer), steps))
        return rounds

    for size in RANKS:
        for turn in zip(*on_ranks(size, rank), strict=True):
            z, after, pseudo, e, e_after, steps = zip(*turn, strict=True)
            assert all(torch.equal(one, after[0]) for one in after)
            mean = sum(pseudo) / sum(steps)
            close(z[0] - after[0] + sum(e_after), sum(e) + mean)


def test_model_changed_on_one_rank_between_rounds_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No error: other processors may round the outer step in another way."""

    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2)

        def take_round(turn: int) -> None:
            for step in range(2 * turn, 2 * turn + 2):
                backward(model, transport.rank, step)
                optimizer.step()

        take_round(0)
        with torch.no_grad():
            next(model.parameters()).add_(transport.rank)
        take_round(1)
        take_round(2)

    on_ranks(2, rank)
    for number in range(2):
        text = f"rank {number}: the replicas are not the same at step 4: parameter 'noname.0.0' has"
        assert caplog.text.count(text) == 1
    assert caplog.text.count("the replicas are not the same") == 2


def test_rank_without_a_step_has_weight_0() -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), None, averaging)
        assert not optimizer.outer_step()  # no rank has taken one
        assert optimizer.last_step is None
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


@pytest.mark.parametrize("loaded", [False, True])
def test_round_longer_than_reduced_inner_steps_ends_at_the_next_step(loaded: bool) -> None:
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


def test_round_with_a_failed_exchange_ends_with_the_next_step() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2)
        (group,) = optimizer.outer.param_groups
        backward(model, transport.rank, 0)
        optimizer.step()
        rate, group["lr"] = group["lr"], 1.0 + transport.rank  # unequal
        backward(model, transport.rank, 1)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1: outer SGD"):
            optimizer.step()
        group["lr"] = rate
        backward(model, transport.rank, 2)
        optimizer.step()
        assert (optimizer.outer_steps, optimizer.steps_made) == (1, 0)

    on_ranks(2, rank)


def test_unequal_inner_steps_or_initial_parameters_raise() -> None:
    def disagree(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2 + transport.rank)
        backward(model, 0, 0)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1: inner_steps=3"):
            optimizer.step()

    def diverge(transport: LocalTransport) -> None:
        model = network()
        with torch.no_grad():
            model[2].bias += transport.rank
        optimizer = LocalSGD(
            momentum(model.parameters()), 2, named_parameters=model.named_parameters()
        )
        backward(model, 0, 0)
        with pytest.raises(hvd.HorovodInternalError, match=r"'2\.bias' has the checksums"):
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 0)
        backward(model, 0, 0)
        optimizer.step()
        assert optimizer.steps_made == 1

    for program in (disagree, diverge):
        on_ranks(2, program)


def test_integer_options_agree_with_equal_floats() -> None:
    def rank(transport: LocalTransport) -> None:
        one = [1, 1.0][transport.rank]
        outer = partial(torch.optim.SGD, lr=one, momentum=0 * one)
        sparse = hvd.Compression.gtopk(density=0.5)
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 1, outer, sparse, residual_decay=one)
        backward(model, 0, 0)
        optimizer.step()
        assert optimizer.outer_steps == 1

    on_ranks(2, rank)


def test_uninitialized_parameter_raises_with_its_name() -> None:
    def rank(transport: LocalTransport) -> None:
        model = torch.nn.LazyLinear(3)
        with pytest.raises(ValueError, match="parameter 'weight' has no size yet: run a batch"):
            LocalSGD(
                torch.optim.SGD(model.parameters(), lr=0.1),
                1,
                named_parameters=model.named_parameters(),
            )

    on_ranks(1, rank)


def epochs(optimizer: Any, model: torch.nn.Module, rank: int, batches: int) -> None:
    """Train two epochs of `batches` batches, as in docs/local_sgd.md."""
    for epoch in range(2):
        for step in range(batches):
            backward(model, rank, 10 * epoch + step)
            optimizer.step()
        optimizer.outer_step()


def test_outer_step_after_a_complete_round_records_no_skipped_step(
    tmp_path: Path,
) -> None:
    def rank(transport: LocalTransport) -> None:
        gtopk.record(str(tmp_path))
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), inner_steps=2)
        epochs(optimizer, model, transport.rank, 4)
        assert (optimizer.outer_steps, optimizer.skipped_steps) == (4, 0)
        assert optimizer.last_step.local_steps == 2
        before, last_step = weights(model), optimizer.last_step
        assert not optimizer.outer_step()
        assert torch.equal(weights(model), before)
        assert optimizer.last_step is last_step

    on_ranks(2, rank)
    for record in read_run(tmp_path).ranks:
        assert [step.report.skipped for step in record.steps] == [False] * 4


def test_rank_without_a_step_records_the_outer_step(tmp_path: Path) -> None:
    def rank(transport: LocalTransport) -> None:
        gtopk.record(str(tmp_path))
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), inner_steps=None)
        for step in range(2 * transport.rank):
            backward(model, transport.rank, step)
            optimizer.step()
        assert optimizer.outer_step()

    on_ranks(2, rank)
    run = read_run(tmp_path)
    assert run.skipped_text() is None
    found = [[(s.report.step, s.report.local_steps) for s in each.steps] for each in run.ranks]
    assert found == [[(0, 0)], [(1, 2)]]


def test_ranks_that_end_rounds_differently_raise_with_advice() -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        start = weights(model)
        optimizer = LocalSGD(momentum(model.parameters()), inner_steps=4)
        with pytest.raises(hvd.HorovodInternalError) as raised:
            epochs(optimizer, model, transport.rank, [5, 3][transport.rank])
        message = str(raised.value)
        assert "rank 0: the round ended after inner_steps=4" in message
        assert "rank 1: the script called outer_step()" in message
        assert "use inner_steps=None" in message
        assert (optimizer.outer_steps, optimizer.steps_made) == (0, [4, 3][transport.rank])
        assert not torch.equal(weights(model), start)  # the replica is as before

    on_ranks(2, rank)


@pytest.mark.parametrize(
    ("inner_steps", "batches", "outer_steps"),
    [(None, (5, 3), 2), (4, (7, 5), 4), (8, (5, 3), 2)],
)
def test_ranks_may_take_unequal_steps_if_rounds_end_for_one_reason(
    inner_steps: int | None, batches: tuple[int, int], outer_steps: int
) -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), inner_steps)
        epochs(optimizer, model, transport.rank, batches[transport.rank])
        assert optimizer.outer_steps == outer_steps
        return weights(model)

    one, other = on_ranks(2, rank)
    assert torch.equal(one, other)


def test_failed_exchange_leaves_model_residual_and_gradients_unchanged() -> None:
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


def test_inner_and_outer_learning_rates_can_be_scheduled() -> None:
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
        report = optimizer.last_step
        assert report.exchange_seconds == pytest.approx(
            report.select_seconds + report.communicate_seconds - report.agree_seconds
        )
        assert report.sent_bytes > 0
        assert not report.skipped

    on_ranks(2, rank)


def test_parameters_unfrozen_later_raise() -> None:
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


@pytest.mark.parametrize(
    "compression",
    [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.gtopk(density=1.0)],
    ids=repr,
)
def test_layer_frozen_on_all_ranks_keeps_its_values(compression: Any) -> None:
    """After all its changes are applied, including those of the round in which it was frozen."""

    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 2, nesterov, compression)
        seen = []
        for step in range(12):
            model[0].requires_grad_(not 3 <= step < 8)
            backward(model, transport.rank, step)
            optimizer.step()
            if step % 2:
                seen.append((flat(model[0].parameters()), flat(model[2].parameters())))
        frozen, other = zip(*seen, strict=True)
        stays = [torch.equal(a, b) for a, b in itertools.pairwise(frozen)]
        assert stays == [False, True, True, False, False]
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(other))

    on_ranks(3, rank)


def test_layer_frozen_on_some_ranks_and_unused_on_one_stays_equal() -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 1)
        for step in range(4):
            if step == 2 and transport.rank:
                model[0].requires_grad_(False)
            backward(model, transport.rank, step)
            if step >= 2:
                model[0].zero_grad()
            optimizer.step()
        return weights(model)

    one, *others = on_ranks(3, rank)
    assert all(torch.equal(one, other) for other in others)


def test_default_outer_momentum_is_0_with_a_residual() -> None:
    def rank(transport: LocalTransport) -> None:
        for compression, expected in (
            (hvd.Compression.fp16, (0.7, 0.9)),
            (hvd.Compression.gtopk(density=0.1), (1.0, 0.0)),
        ):
            optimizer = LocalSGD(momentum(network().parameters()), 1, compression=compression)
            (group,) = optimizer.outer.param_groups
            assert (group["lr"], group["momentum"]) == expected

    on_ranks(1, rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1, or None"),
        ({"inner_steps": 2.5}, "inner_steps must be an integer"),
        ({"compression": hvd.Compression.gtopk(dense_vectors=True)}, "per-parameter dense rules"),
        ({"compression": hvd.Compression.auto(hide_behind_backward=True)}, "bytes_per_step="),
        ({"compression": "gtopk"}, "compression must be"),
        ({"process_set": [0]}, r"process_set must be a ProcessSet, .* got \[0\]"),
        ({"outer": "nesterov"}, "outer= must be a function of a list of parameters, got 'nest"),
        ({"outer": []}, r"outer= must be a function of a list of parameters, got \[\]"),
        (
            {"outer": lambda parameters: None},
            "the result of outer= must be a torch.optim.Optimizer",
        ),
        ({"outer": torch.optim.LBFGS}, "LBFGS needs a closure, and the outer step has none"),
        (  # the ranks' changes of the others would be summed and discarded
            {"outer": lambda parameters: averaging(parameters[1:])},
            "must step the 4 parameters that outer= is given, got 3 of them and 0 others",
        ),
        (
            {"outer": lambda parameters: averaging(network().parameters())},
            "must step the 4 parameters that outer= is given, got 0 of them and 4 others",
        ),
        (
            {"outer": nesterov, "compression": hvd.Compression.gtopk(momentum_correction=0.9)},
            r"use an outer optimizer with momentum=0, not 0\.9$",
        ),
        (
            {
                "outer": torch.optim.AdamW,
                "compression": hvd.Compression.topk(momentum_correction=0.9),
            },
            "AdamW has a momentum of its own: leave momentum_correction at 0, or use SGD$",
        ),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    def rank(transport: LocalTransport) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            LocalSGD(momentum(network().parameters()), **{"inner_steps": 1, **options})

    on_ranks(1, rank)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("inner_steps", 0, "inner_steps must be at least 1, or None"),
        ("inner_steps", "4", "inner_steps must be an integer"),
        ("overlap_steps", -1, "overlap_steps must be 0 or more"),
        ("overlap_steps", None, "overlap_steps must be an integer"),
    ],
)
def test_invalid_option_set_later_raises_before_the_step(
    name: str, value: Any, message: str
) -> None:
    def rank(transport: LocalTransport) -> None:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 1)
        before = weights(model)
        backward(model, transport.rank, 0)
        setattr(optimizer, name, value)
        for step in (optimizer.step, optimizer.outer_step):
            with pytest.raises((TypeError, ValueError), match=message):
                step()
        assert torch.equal(weights(model), before)

    on_ranks(1, rank)


def test_mpirun_ranks_train_save_and_resume(mpirun: Any, tmp_path: Any) -> None:
    job = mpirun(2, "local_sgd.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("local steps, one model") == 2


def test_local_sgd_between_nodes_works_with_ddp_inside_nodes(forked: Any) -> None:
    job = forked(4, "local_sgd_nodes.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("DDP inside, local steps between") == 4


def test_record_contains_residual_norms(tmp_path: Path) -> None:
    def rank(transport: LocalTransport) -> None:
        gtopk.record(str(tmp_path))
        model = network()
        optimizer = LocalSGD(
            momentum(model.parameters()),
            inner_steps=2,
            compression=hvd.Compression.gtopk(density=0.1, dense_under=0),
        )
        for step in range(4):
            backward(model, transport.rank, step)
            optimizer.step()

    on_ranks(2, rank)
    for record in read_run(tmp_path).ranks:
        assert [note.content["norm"] > 0 for note in record.residuals] == [True, True]
