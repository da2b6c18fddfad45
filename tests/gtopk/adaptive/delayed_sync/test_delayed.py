"""Delayed synchronous rounds, on the engine, on ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from collectives.errors import MismatchError
from collectives.transports import Transport
from gtopk.adaptive.delayed_sync.rounds import (
    AgreedSettings,
    RoundReduction,
    Rounds,
)
from gtopk.adaptive.replica import RoundExchange
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks
from tests.gtopk.adaptive.sums_of_samples import (
    GTOPK,
    Model,
    adapted,
    data,
    prompt,
    run,
    stop_apart,
)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_epoch_computes_and_applies_every_sample_once(size: int, reduction: str) -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 101, loss_reduction=reduction)
        seen, updates, totals = [], [], []
        apply = loader.rounds._apply

        def recorded(samples: int) -> None:
            updates.append(model.weight.grad.clone())
            totals.append(samples)
            apply(samples)

        loader.rounds._apply = recorded
        for _ in range(2):
            epoch = []
            for indices, x in loader:
                epoch += indices.tolist()
                loss = model(x).mean() if reduction == "mean" else model(x).sum()
                loss.backward()
                optimizer.step()
            assert loader.rounds.is_drained
            seen.append(epoch)
        return seen, updates, totals, model.weight.detach()

    results = on_ranks(size, program)
    for epoch in range(2):
        assert sorted(i for seen, *_ in results for i in seen[epoch]) == list(range(101))
    _, updates, totals, weight = results[0]
    assert sum(totals) == 202
    # Each update is the mean over its round; together they are every sample, twice.
    together = sum(total * update for total, update in zip(totals, updates, strict=True))
    torch.testing.assert_close(together, 2 * data(101).tensors[1].sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight, -sum(updates), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(weight, other) for *_, other in results)


def test_gtopk_conserves_updates_and_residuals_over_rounds() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 96, hvd.Compression.gtopk(density=0.4))
        weighted = torch.zeros(3, dtype=torch.float64)
        pending: list[torch.Tensor] = []
        rounds, reduce = loader.rounds, loader.rounds._wire.reduce

        def recorded(gradients: Any, samples: int, batches: int) -> Any:
            sums = gradients[0].clone() if gradients[0] is not None else torch.zeros(3).double()
            operation = reduce(gradients, samples, batches)
            pending.append((sums, operation))
            return operation

        rounds._wire.reduce = recorded
        for _, x in loader:
            model(x).mean().backward()
            optimizer.step()
        for sums, operation in pending:
            if total := sum(operation.wait().samples):
                weighted += sums / total
        return model.weight.detach(), loader.state_dict()["residual"], weighted

    results = on_ranks(3, program)
    left = -results[0][0] + sum(residual for _, residual, _ in results)
    torch.testing.assert_close(left, sum(w for *_, w in results), rtol=1e-12, atol=1e-12)


class ImmediateWire:
    """A wire of one rank, which is always ready, with the sums as its update."""

    class Completed:
        done = True

        def __init__(self, result: Any) -> None:
            self.result = result

        def wait(self) -> Any:
            return self.result

    def ready(self, is_last: bool) -> Any:
        return self.Completed(is_last)

    def reduce(self, gradients: list[Any], samples: int, batches: int) -> Any:
        return self.Completed(
            RoundReduction([g / samples for g in gradients], [samples], [batches])
        )


def descend(rate: float, momentum: float, rounds_to_go: int = 4000) -> tuple[float, list[int]]:
    """Return |x| on x^2/2 after many rounds, and the delay of each applied round."""
    x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=rate, momentum=momentum)
    taken_at: list[int] = []  # round in which each update's gradients were taken
    delays: list[int] = []

    def apply(samples: int) -> None:
        delays.append(rounds.number - taken_at.pop(0))
        optimizer.step()

    rounds = Rounds([x], ImmediateWire(), 0, 1, least_samples=1, apply=apply)
    number = -1
    while rounds.number < rounds_to_go and abs(x.item()) < 1e6:
        if rounds.number != number:
            number = rounds.number
            taken_at.append(number)
        (x**2 / 2).sum().backward()
        rounds.add(1, summed=False)
        rounds.poll()
    return abs(x.item()), delays


def test_update_is_applied_exactly_one_round_late() -> None:
    _, delays = descend(0.1, 0.0, rounds_to_go=50)
    assert set(delays) == {1}


@pytest.mark.parametrize(
    ("rate", "momentum", "stable"),
    [(0.98, 0.0, True), (1.02, 0.0, False), (0.098, 0.9, True), (0.102, 0.9, False)],
)
def test_learning_rate_is_stable_up_to_one_minus_momentum(
    rate: float, momentum: float, stable: bool
) -> None:
    distance, _ = descend(rate, momentum)
    assert (distance < 1e-2) == stable


def test_nonfinite_gradient_skips_round_on_every_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 64)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        for number, (_, x) in enumerate(loader):
            model(x * float("nan") if here.rank == 1 and number == 0 else x).mean().backward()
            optimizer.step()
        scheduler.step()
        skipped = loader.rounds.skipped, optimizer.skipped_steps
        return skipped, bool(model.weight.isfinite().all())

    with caplog.at_level("WARNING", "gtopk"):
        assert on_ranks(2, program) == [((1, 1), True)] * 2
    assert "the gradient is not finite on rank 1" in caplog.text


def test_differing_learning_rates_raise_the_same_error_on_every_rank() -> None:
    """A schedule that is stepped with every batch is further on a rank that makes more of them."""

    def program(here: World) -> str:
        loader, model, optimizer = adapted(here, 120)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        try:
            for _, x in loader:
                model(x).mean().backward()
                optimizer.step()
                if here.rank == 1 or scheduler.last_epoch == 0:
                    scheduler.step()
        except hvd.HorovodInternalError as error:
            return str(error)
        return "none"

    errors = on_ranks(2, program)
    assert errors[0] == errors[1]
    assert "about the settings of a round: rank 0: lr=0.5 of group 0; rank 1: lr=" in errors[0]
    assert "while scheduler.last_epoch < loader.round: scheduler.step()" in errors[0]


@pytest.mark.parametrize("moves_momentum", [False, True])
def test_scheduler_stepped_by_round_keeps_replicas_equal(moves_momentum: bool) -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 120)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if moves_momentum:
            optimizer.param_groups[0]["momentum"] = 0.1
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=1000, base_momentum=0.0, max_momentum=0.2
            )
        behind = 0
        for _ in range(3):
            loader._passes.speeds = [29, 1]  # rank 1 does not see the last rounds end
            for _, x in loader:
                model(x).mean().backward()
                optimizer.step()
                behind = max(behind, loader.round - scheduler.last_epoch)
                while scheduler.last_epoch < loader.round:
                    scheduler.step()
        assert scheduler.last_epoch > 2
        return behind, model.weight.detach()

    (_, weight), (behind, other) = on_ranks(2, program)
    assert behind > 1
    assert torch.equal(weight, other)


def test_rank_behind_by_a_round_adopts_the_agreed_settings(threads: Callable[..., Any]) -> None:
    def program(transport: Transport) -> list[float]:
        # Rank 2 had nothing left to compute when round 7 began.
        rate = [0.5, 0.5, 1.0][transport.rank]
        group: dict[str, Any] = {"lr": torch.tensor(rate, dtype=torch.float64)}
        group["betas"] = (0.9, [0.99, 0.99, 0.5][transport.rank])
        group["steps"] = transport.rank // 2
        groups = [{"maximize": True, "foreach": None}, group]
        optimizer = SimpleNamespace(param_groups=[])
        settings = AgreedSettings(cast(Any, optimizer))
        optimizer.param_groups = groups  # as a state that is loaded brings others
        settings.seen = [7, 7, 6][transport.rank]
        settings.agree(transport, settings.encode())
        own = dict(group)
        with settings.set():
            found = float(group["lr"])
            assert group["betas"] == (0.9, 0.99)
            group["steps"] += 1  # as some optimizers count
        assert group["steps"] == 1
        assert all(group[name] is own[name] for name in ("lr", "betas"))
        group["lr"] = torch.tensor(1.0 + transport.rank)
        with pytest.raises(MismatchError, match=r"rank 0: lr=1\.0 of group 1; rank 1: lr=2\.0"):
            settings.agree(transport, settings.encode())
        return [found]

    assert threads(3, program) == [[0.5]] * 3


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_epoch_resumes_midway_on_any_number_of_ranks(before: int, after: int) -> None:
    def save(here: World) -> Any:
        loader, model, optimizer = prompt(adapted(here, 150, GTOPK))
        states: list[Any] = []
        seen = run(loader, model, optimizer, 2, states)
        (state,) = states
        return seen, {name: each for name, each in state.items() if name != "residual"}, state

    def resume(here: World) -> Any:
        loader, model, optimizer = prompt(adapted(here, 150, GTOPK))
        loader.load_state_dict(saved[min(here.rank, before - 1)][2])
        return run(loader, model, optimizer), model.weight.detach(), loader.state_dict()["epochs"]

    saved = on_ranks(before, save)
    assert all(shared_state == saved[0][1] for _, shared_state, _ in saved)
    assert 0 < saved[0][1]["epochs"]["start"] < 150
    found = on_ranks(after, resume)
    assert sorted(i for seen, *_ in saved + found for i in seen) == list(range(150))
    assert all(torch.equal(weight, found[0][1]) for _, weight, _ in found)
    assert found[0][2] == {"epoch": 1, "start": 0}


def test_resumed_run_equals_uninterrupted_run_bitwise() -> None:
    corrected = hvd.Compression.gtopk(density=0.4, momentum_correction=0.5, warmup_steps=6)

    def open_run(here: World) -> Any:
        return prompt(adapted(here, 150, corrected))

    def everything(parts: Any) -> Any:
        seen = [run(*parts) for _ in range(2)]
        state = parts[0].state_dict()
        held = [state.pop(name).numpy().tobytes() for name in ("residual", "velocity")]
        return seen, parts[1].weight.detach().numpy().tobytes(), state, held

    def uninterrupted(here: World) -> Any:
        parts = open_run(here)
        seen = []
        batches = iter(parts[0])
        for indices, x in batches:
            seen += indices.tolist()
            parts[1](x).mean().backward()
            parts[2].step()
            if parts[0].round == 2:
                parts[0].drain()
                saved = parts[0].state_dict(), parts[1].weight.detach().clone()
                break
        rest = []
        for indices, x in batches:
            rest += indices.tolist()
            parts[1](x).mean().backward()
            parts[2].step()
        after, *others = everything(parts)
        return saved, ([rest, *after], *others)

    def resumed(here: World) -> Any:
        loader, model, optimizer = open_run(here)
        state, weight = finished[here.rank][0]
        loader.load_state_dict(state)
        with torch.no_grad():
            model.weight.copy_(weight)
        rest = run(loader, model, optimizer)
        after, *others = everything((loader, model, optimizer))
        return [rest, *after], *others

    finished = on_ranks(2, uninterrupted)
    assert on_ranks(2, resumed) == [run for _, run in finished]


@pytest.mark.parametrize("drains", [False, True])
def test_loading_state_after_break_equals_new_loader_with_that_state(
    drains: bool,
) -> None:
    """One rank has already sent its part of a round; the rate changes before all continue."""
    corrected = hvd.Compression.gtopk(density=0.4, momentum_correction=0.5, warmup_steps=6)
    has_loaded = threading.Event()

    def without_tensors(state: dict[str, Any]) -> dict[str, Any]:
        return {name: each for name, each in state.items() if not torch.is_tensor(each)}

    def program(here: World) -> Any:
        parts = prompt(adapted(here, 160, corrected))
        loader, model, _ = parts
        states: list[Any] = []
        run(*parts, 2, states)
        (state,) = states
        weight = model.weight.detach().clone()
        stop_apart(here, *parts)

        def continue_training(loader: Any, model: Model, optimizer: Any) -> Any:
            with torch.no_grad():
                model.weight.copy_(weight)
            optimizer.param_groups[0]["lr"] = 0.5
            seen = run(*prompt((loader, model, optimizer)))
            after = loader.state_dict()
            held = [after[name].numpy().tobytes() for name in ("residual", "velocity")]
            return seen, without_tensors(after), model.weight.detach().numpy().tobytes(), held

        if here.rank == 1:
            assert has_loaded.wait(30)  # before this rank comes
        loader.load_state_dict(state)
        has_loaded.set()
        assert without_tensors(loader.state_dict()) == without_tensors(state)
        assert torch.equal(loader.state_dict()["residual"], state["residual"])
        assert loader.round == state["round"]
        if drains:
            loader.drain()
        again = continue_training(*parts)
        new = adapted(here, 160, corrected)
        new[0].load_state_dict(state)
        return again, continue_training(*new)

    for again, anew in on_ranks(2, program):
        assert again == anew


def test_next_epoch_begins_from_state_loaded_after_an_epoch() -> None:
    def program(here: World) -> None:
        parts = prompt(adapted(here, 64))
        loader = parts[0]
        run(*parts)
        state, seen = loader.state_dict(), run(*parts)
        after = loader.state_dict()
        loader.load_state_dict(state)
        assert loader.round == state["round"]
        assert loader.state_dict() == state
        assert (run(*parts), loader.state_dict()) == (seen, after)

    on_ranks(2, program)


def test_rank_without_samples_gets_placeholder_batch_to_drain() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 120)
        loader._passes.speeds = [29, 1]  # rank 1 has one micro-batch
        seen, placeholders, drained_at = [], 0, []
        for indices, x in loader:
            placeholders += not loader.num_samples
            seen += indices.tolist() if loader.num_samples else []
            model(x).mean().backward()
            optimizer.step()
            if loader.drain_wanted or (here.rank == 0 and len(seen) == 20):
                loader.drain()
                drained_at.append((loader.round, loader.state_dict()["passes"]))
        return seen, placeholders, drained_at, model.weight.detach()

    (seen, none, at, weight), (others, placeholders, also_at, also) = on_ranks(2, program)
    assert sorted(seen + others) == list(range(120))
    assert (none, placeholders) == (0, 1)
    assert len(at) == 1
    assert at == also_at
    assert torch.equal(weight, also)


def test_drain_on_some_ranks_only_raises_on_every_rank() -> None:
    def program(here: World) -> str:
        loader, model, optimizer = adapted(here, 80)
        try:
            for _, x in loader:
                model(x).mean().backward()
                optimizer.step()
                if here.rank != 1:
                    loader.drain()
        except RuntimeError as error:
            return str(error)
        return "none"

    for error in on_ranks(3, program):
        assert "ranks [0, 2] called loader.drain()" in error
        assert "ranks [1] did not" in error


def test_break_on_all_ranks_ends_the_epoch() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 64)
        for _, x in loader:
            model(x).mean().backward()
            optimizer.step()
            break
        return run(loader, model, optimizer), loader.state_dict()["epochs"]

    results = on_ranks(2, program)
    assert sorted(i for seen, _ in results for i in seen) == list(range(64))
    assert results[0][1] == {"epoch": 2, "start": 0}


def test_resumed_run_skips_epoch_that_ended_by_break() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = prompt(adapted(here, 150))
        run(loader, model, optimizer, until=2)
        state = loader.state_dict()
        next_epoch = run(loader, model, optimizer)
        resumed = prompt(adapted(here, 150))
        resumed[0].load_state_dict(state)
        assert run(*resumed) == next_epoch
        return next_epoch, state["epochs"]

    results = on_ranks(2, program)
    assert sorted(i for seen, _ in results for i in seen) == list(range(150))
    assert [epochs for _, epochs in results] == [{"epoch": 1, "start": 0}] * 2


def test_state_within_epoch_requires_drain() -> None:
    def program(here: World) -> None:
        loader, model, optimizer = adapted(here, 64)
        loader.drain()  # between epochs there is nothing to do
        with pytest.raises(ValueError, match="takes no set_num_samples"):
            optimizer.set_num_samples(7)
        for _, x in loader:
            with pytest.raises(RuntimeError, match=r"not applied yet.*call loader.drain\(\)"):
                loader.state_dict()
            model(x).mean().backward()
            optimizer.step()
            loader.drain()
            with pytest.raises(RuntimeError, match="without a current batch"):
                optimizer.step()
            break
        state = loader.state_dict()
        other, *_ = adapted(here, 64)
        other.load_state_dict(state)
        assert other.state_dict() == {**state, "round": other.round}
        with pytest.raises(ValueError, match="the state's 'balanced'"):
            other.load_state_dict({"mode": "balanced"})

    on_ranks(1, program)


def test_mode_abs_warns_of_momentum_and_rejects_unsupported_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(here: World) -> None:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        hvd.adapt(DataLoader(data(8), 4), optimizer, "abs")
        (warning,) = [text for text in caplog.messages if "one round late" in text]
        assert "with momentum 0.9 the learning rate must stay below 0.1/L, where synch" in warning
        other = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
        )
        with pytest.raises(ValueError, match="measures no noise"):
            hvd.adapt(DataLoader(data(8), 4), other, "abs", lr_scaling="adascale")
        for name in ("min_batch", "max_batch", "grain"):
            with pytest.raises(ValueError, match=f"use micro_batch in place of {name}, got .*=4"):
                hvd.adapt(DataLoader(data(8), 4), other, "abs", **{name: 4})
        held = RoundExchange(list(model.parameters()), GTOPK).state_dict()
        with pytest.raises(ValueError, match="keeps no residual"):
            RoundExchange(list(model.parameters()), hvd.Compression.none).load_state_dict(held)
        twice = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            backward_passes_per_step=2,
        )
        with pytest.raises(ValueError, match="backward_passes_per_step=1, got 2"):
            hvd.adapt(DataLoader(data(8), 4), twice, "abs")

    on_ranks(1, program)
