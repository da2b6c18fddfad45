"""Delayed synchronous rounds, on the engine, on ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk import world
from gtopk.adaptive.round_exchange import RoundExchange
from gtopk.adaptive.rounds import Ready, Reduced, Rounds
from gtopk.world import World


def on_ranks(size: int, program: Callable[[World], Any]) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        with world.entered(transport) as here:
            return program(here)

    return run_ranks(local_world(size, timeout_seconds=30), rank)


def data(length: int) -> TensorDataset:
    x = torch.randn(length, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(length), x)


class Model(torch.nn.Module):
    """Its gradient at a sample is the sample: sums of gradients are sums of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def adapted(
    here: World, length: int, compression: Any = hvd.Compression.none, **options: Any
) -> Any:
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression
    )
    loader = hvd.adapt(
        DataLoader(data(length), 8, shuffle=True), optimizer, "abs", micro_batch=4, **options
    )
    return loader, model, optimizer


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_sample_is_computed_and_applied_once_an_epoch(size: int, reduction: str) -> None:
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


def test_nothing_is_lost_with_gtopk() -> None:
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
        state = loader.state_dict()
        other, *_ = adapted(here, 96, hvd.Compression.gtopk(density=0.4))
        other.load_state_dict(state)
        assert torch.equal(other.exchange.residual, loader.exchange.residual)
        return model.weight.detach(), loader.exchange.residual, weighted

    results = on_ranks(3, program)
    left = -results[0][0] + sum(residual for _, residual, _ in results)
    torch.testing.assert_close(left, sum(w for *_, w in results), rtol=1e-12, atol=1e-12)


class AtOnce:
    """A wire of one rank, which is always ready, with the sums as its update."""

    class Over:
        done = True

        def __init__(self, result: Any) -> None:
            self.result = result

        def wait(self) -> Any:
            return self.result

    def ready(self, samples: int, is_last: bool) -> Any:
        return self.Over(Ready(samples, is_last))

    def reduce(self, gradients: list[Any], samples: int, batches: int) -> Any:
        return self.Over(Reduced([g / samples for g in gradients], [samples], [batches]))


def descend(rate: float, momentum: float, rounds_to_go: int = 4000) -> tuple[float, list[int]]:
    """Return |x| on x^2/2 after many rounds, and the delay of each applied round."""
    x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=rate, momentum=momentum)
    taken_at: list[int] = []  # round in which each update's gradients were taken
    delays: list[int] = []

    def apply(samples: int) -> None:
        delays.append(rounds.number - taken_at.pop(0))
        optimizer.step()

    rounds = Rounds([x], AtOnce(), 0, 1, least_samples=1, apply=apply)
    number = -1
    while rounds.number < rounds_to_go and abs(x.item()) < 1e6:
        if rounds.number != number:
            number = rounds.number
            taken_at.append(number)
        (x**2 / 2).sum().backward()
        rounds.add(1, summed=False)
        rounds.poll()
    return abs(x.item()), delays


def test_the_delay_is_exactly_one_round() -> None:
    _, delays = descend(0.1, 0.0, rounds_to_go=50)
    assert set(delays) == {1}


@pytest.mark.parametrize(
    ("rate", "momentum", "stable"),
    [(0.98, 0.0, True), (1.02, 0.0, False), (0.098, 0.9, True), (0.102, 0.9, False)],
)
def test_rates_are_stable_up_to_one_minus_momentum(
    rate: float, momentum: float, stable: bool
) -> None:
    distance, _ = descend(rate, momentum)
    assert (distance < 1e-2) == stable


def test_a_gradient_that_is_not_finite_skips_a_round_on_every_rank() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 64)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        for number, (_, x) in enumerate(loader):
            model(x * float("nan") if here.rank == 1 and number == 0 else x).mean().backward()
            optimizer.step()
        scheduler.step()
        return loader.rounds.skipped, bool(model.weight.isfinite().all())

    assert on_ranks(2, program) == [(1, True)] * 2


def test_a_checkpoint_waits_for_the_end_of_the_epoch() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(here, 64)
        refused = False
        for _, x in loader:
            model(x).mean().backward()
            optimizer.step()
            try:
                loader.state_dict()
            except RuntimeError as error:
                refused = refused or "under way" in str(error)
        state = loader.state_dict()
        other, *_ = adapted(here, 64)
        other.load_state_dict(state)
        with pytest.raises(ValueError, match="the state's 'balanced'"):
            other.load_state_dict({"mode": "balanced"})
        return refused, other.state_dict() == state, state["epochs"]["epoch"], len(loader)

    assert on_ranks(2, program) == [(True, True, 1, 16)] * 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_what_rounds_cannot_do_is_said() -> None:
    def program(here: World) -> None:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        with pytest.warns(UserWarning, match=r"with momentum 0.9 .* stay below 0.1/L"):
            hvd.adapt(DataLoader(data(8), 4), optimizer, "abs")
        with pytest.raises(ValueError, match="needs a data set of a length"):
            hvd.adapt(DataLoader(Stream(), 2), optimizer, "abs")
        with pytest.raises(ValueError, match="measures no noise"):
            hvd.adapt(DataLoader(data(8), 4), optimizer, "abs", lr_scaling="adascale")
        with pytest.raises(ValueError, match="keeps no residual"):
            RoundExchange(list(model.parameters()), hvd.Compression.none).residual = torch.zeros(3)
        twice = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            backward_passes_per_step=2,
        )
        with pytest.raises(ValueError, match="backward_passes_per_step=1, got 2"):
            hvd.adapt(DataLoader(data(8), 4), twice, "abs")
        clipping = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            global_clip_norm=1.0,
        )
        with pytest.raises(ValueError, match="takes no global_clip_norm"):
            hvd.adapt(DataLoader(data(8), 4), clipping, "abs")

    on_ranks(1, program)
