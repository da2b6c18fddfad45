"""Mode "adaptive-sgd" on ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk
import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.adaptive.merging.strategies import STRATEGIES
from gtopk.adaptive.shares.cursor import by_speed
from gtopk.replicas.replicas import BUFFERS_STAY
from gtopk.world import world
from gtopk.world.world import World

LENGTH = 203
# By the clock, a thread may come too late for any batch of a mega-batch.
EVENLY = {2: by_speed([1.0] * 2), 3: by_speed([1.0] * 3)}


def on_ranks(size: int, program: Callable[[World], Any]) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        with world.entered(transport) as here:
            return program(here)

    return run_ranks(local_world(size, timeout_seconds=30), rank)


def data(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(length), x, x @ torch.tensor([1.0, -2.0, 0.5]).double())


class Run:
    """A linear model, its optimizer and its adapted loader, on one rank."""

    def __init__(
        self,
        compression: Any = hvd.Compression.none,
        batch: int = 8,
        lr: float = 0.05,
        momentum: float = 0.0,
        **options: Any,
    ) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=lr, momentum=momentum),
            [("weight", self.weight)],
            compression,
            **options.pop("distributed", {}),
        )
        loader = DataLoader(data(), batch, shuffle=True)
        self.loader = hvd.adapt(loader, self.optimizer, "adaptive-sgd", **options)

    def epoch(self, until: Callable[[], bool] = lambda: False, summed: bool = False) -> list[int]:
        """Train; return the samples seen, in order."""
        seen: list[int] = []
        for indices, x, y in self.loader:
            if until():
                break
            seen += indices.tolist()
            assert len(indices) == self.loader.num_samples
            self.optimizer.zero_grad()
            losses = (x @ self.weight - y).square() / 2
            (losses.sum() if summed else losses.mean()).backward()
            self.optimizer.step()
        return seen

    def error(self) -> float:
        with self.loader.merged():
            return float((self.weight - torch.tensor([1.0, -2.0, 0.5])).detach().norm())


@pytest.mark.parametrize("algorithm", sorted(STRATEGIES))
def test_every_sample_is_trained_with_once_an_epoch_and_ranks_agree(algorithm: str) -> None:
    def program(here: World) -> Any:
        run = Run(algorithm=algorithm, mega_batch=64)
        seen = [run.epoch() for _ in range(6)]
        with run.loader.merged():
            merged = run.weight.detach().clone()
        return seen, merged, run.error()

    for size in (1, 3):
        results = on_ranks(size, program)
        for epoch in range(6):
            assert sorted(i for seen, *_ in results for i in seen[epoch]) == list(range(LENGTH))
        assert all(torch.equal(merged, results[0][1]) for _, merged, _ in results)
        assert results[0][2] < 0.5


def serial(batches: list[list[int]], lr: float, batch: int) -> torch.Tensor:
    """Return what one process learns from these batches, their rate in proportion to their size."""
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=lr)
    _, x, y = data().tensors
    for indices in batches:
        for group in optimizer.param_groups:
            group["lr"] = lr * len(indices) / batch
        optimizer.zero_grad()
        ((x[indices] @ weight - y[indices]).square() / 2).mean().backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("summed", [False, True])
def test_s_sgd_is_one_process_on_the_whole_batch(summed: bool) -> None:
    reduction = "sum" if summed else "mean"

    def program(here: World) -> Any:
        run = Run(algorithm="s-sgd", loss_reduction=reduction, lr=0.02)
        for _ in range(2):
            run.epoch(summed=summed)
        return run.weight.detach()

    order = [torch.randperm(LENGTH, generator=torch.Generator().manual_seed(e)) for e in range(2)]
    batches = [part.tolist() for each in order for part in each.split(24)]
    expected = serial(batches, 0.02, 24)
    for weight in on_ranks(3, program):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def test_merged_models_are_the_weighted_means_of_local_ones() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=1000, replay=by_speed([2.0, 1.0, 1.0]))
        seen = run.epoch()
        return seen, run.loader.last_merge, run.weight.detach()

    results = on_ranks(3, program)
    merge = results[0][1]
    assert merge.weights == [r.updates / sum(r.updates for r in merge.reports) for r in
                             merge.reports]  # fmt: skip
    models = []
    for seen, *_ in results:
        models.append(serial([seen[i : i + 8] for i in range(0, len(seen), 8)], 0.05, 8))
    expected = sum(w * model for w, model in zip(merge.weights, models, strict=True))
    for *_, weight in results:
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def test_a_record_of_takes_repeats_a_run_to_the_bit() -> None:
    def run_with(here: World, replay: Any) -> Any:
        run = Run(hvd.Compression.gtopk(density=0.4), mega_batch=50, record=True, replay=replay)
        for _ in range(3):
            run.epoch()
        return run.loader.record, run.weight.detach()

    first = on_ranks(3, lambda here: run_with(here, None))
    assert all(record == first[0][0] for record, _ in first)
    again = on_ranks(3, lambda here: run_with(here, first[0][0]))
    for (record, weight), (same_record, same_weight) in zip(first, again, strict=True):
        assert record == same_record
        assert torch.equal(weight, same_weight)


def test_a_record_repeats_a_run_that_went_on_from_a_state() -> None:
    """Once, it began with the state and was read from the first stretch of all: other takes."""

    def unlike(number: int, total: int, sizes: Sequence[int]) -> list[list[range]]:
        return by_speed([1.0 + number % 3, 1.0 + (number + 1) % 4])(number, total, sizes)

    def program(here: World) -> None:
        options = {"mega_batch": 50, "batch_rule": "none"}
        first = Run(record=True, replay=unlike, **options)
        first.epoch()
        state, before = first.loader.state_dict(), list(first.loader.record)
        epochs, records = [], []
        for replay in (unlike, None):
            run = Run(record=True, replay=replay or records[0], **options)
            run.loader.load_state_dict(state)
            epochs.append([run.epoch() for _ in range(2)])
            records.append(run.loader.record)
        assert epochs[0] == epochs[1]
        assert records[0] == records[1] == [*[[]] * len(before), *records[0][len(before) :]]
        first.epoch()
        first.loader.load_state_dict(state)  # back to there
        assert first.loader.record == before
        with pytest.raises(ValueError, match=r"does not have stretch 0: .* from a later state"):
            Run(replay=records[0], **options).epoch()

    on_ranks(2, program)


def test_sizes_follow_speeds_and_rates_follow_sizes() -> None:
    def program(here: World) -> Any:
        run = Run(batch=16, mega_batch=200, min_batch=1, replay=by_speed([4.0, 2.0, 1.0]))
        sizes, rates = [run.loader.sizes], []
        step = run.optimizer.step
        run.optimizer.register_step_pre_hook(
            lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
        )
        assert step is run.optimizer.step
        for _ in range(3):
            run.epoch()
            sizes.append(run.loader.sizes)
        return sizes, rates, run.loader.last_merge

    results = on_ranks(3, program)
    assert all(sizes == results[0][0] for sizes, *_ in results)
    first, *_, last = results[0][0]
    assert first == [16, 16, 16]
    assert last[0] == 16
    assert last[0] > last[1] > last[2]
    updates = [report.updates for report in results[0][2].reports]
    assert max(updates) - min(updates) <= 1
    for rank, (_, rates, _) in enumerate(results):
        assert rates[-2] == pytest.approx(0.05 * last[rank] / 16)


@pytest.mark.parametrize("algorithm", ["adaptive", "elastic"])
@pytest.mark.parametrize("density", [1.0, 0.4])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(algorithm: str, density: float) -> None:
    compression = hvd.Compression.gtopk(density=density)
    options: dict[str, Any] = {"algorithm": algorithm, "mega_batch": 60, "merge_momentum": 0.5}
    if algorithm == "adaptive":
        options["replay"] = by_speed([3.0, 1.0])

    def program(here: World) -> Any:
        whole = Run(compression, **options)
        whole.epoch()
        state, optimizer = whole.loader.state_dict(), whole.optimizer.state_dict()
        seen = whole.epoch()
        resumed = Run(compression, **options)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.loader.load_state_dict(state)
        assert resumed.epoch() == seen
        assert resumed.loader.state_dict()["batches"] == whole.loader.state_dict()["batches"]
        return torch.equal(whole.weight, resumed.weight)

    assert on_ranks(2, program) == [True, True]


def test_a_state_of_between_epochs_can_be_evaluated_and_drained_before_the_next() -> None:
    """By a loader that has no replica yet, and by one that has gone on since."""
    options: dict[str, Any] = {"mega_batch": 50, "replay": by_speed([2.0, 1.0])}
    compression = hvd.Compression.gtopk(density=0.4)

    def program(here: World) -> None:
        runs = [Run(compression, **options) for _ in range(3)]
        new, gone_on, reference = runs
        for run in (gone_on, reference):
            run.epoch()
        state = reference.loader.state_dict()
        assert state["replica"]["own"]
        gone_on.epoch()
        assert gone_on.loader.last_merge.weights != state["weights"]
        for run in (new, gone_on):
            run.loader.load_state_dict(state)
            assert run.loader.state_dict()["weights"] == state["weights"]
        for of_weight in (lambda run: run.loader.merged(), lambda run: run.loader.drain()):
            found = []
            for run in runs:
                with of_weight(run) or nullcontext():
                    found.append(run.weight.detach().clone())
            assert all(torch.equal(each, found[-1]) for each in found)
        epochs = [run.epoch() for run in runs]
        assert epochs[0] == epochs[1] == epochs[2]
        assert torch.equal(new.weight, reference.weight)

    on_ranks(2, program)


def test_a_loader_goes_back_to_before_its_first_epoch() -> None:
    def program(here: World) -> None:
        run = Run(hvd.Compression.gtopk(density=0.4), mega_batch=50, replay=EVENLY[2])
        state, trained = run.loader.state_dict(), []
        for _ in range(2):
            with torch.no_grad():
                run.weight.zero_()
            run.loader.load_state_dict(state)
            run.epoch()
            trained.append(run.weight.detach().clone())
        assert torch.equal(*trained)

    on_ranks(2, program)


def test_a_checkpoint_within_a_mega_batch_is_that_of_the_last_merge() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=50, lr=0.01, replay=EVENLY[2])
        states: list[Any] = []
        models: list[torch.Tensor] = []
        seen_after: list[int] = []

        def until() -> bool:
            if run.loader.merges == 2 and not models:
                models.append(run.weight.detach().clone())
            if models:
                states.append(run.loader.state_dict())
            return len(states) == 3

        run.epoch(until)
        resumed = Run(mega_batch=50, lr=0.01)
        resumed.loader.load_state_dict(states[-1])
        for indices, *_ in resumed.loader:
            if not seen_after:
                assert torch.equal(resumed.weight, models[0])
            seen_after += indices.tolist()
        left = states[-1]["batches"]["left"]
        return seen_after, sum(stop - start for start, stop in left)

    results = on_ranks(2, program)
    seen = sorted(index for seen, _ in results for index in seen)
    assert len(set(seen)) == len(seen) == results[0][1] == LENGTH - 2 * 51


def test_a_worker_that_dies_costs_only_its_samples_since_the_last_merge() -> None:
    states: list[dict[str, Any]] = []
    told: list[str] = []

    def program(here: World) -> None:
        run = Run(mega_batch=50, lr=0.01, replay=EVENLY[3])
        batches = [0]

        def until() -> bool:
            if here.rank == 0 and run.loader.merges > len(states):
                states.append(run.loader.state_dict())
            batches[0] += run.loader.merges == 2
            if here.rank == 1 and batches[0] == 2:
                raise RuntimeError("it dies")
            return False

        try:
            run.epoch(until)
        except hvd.HorovodInternalError as error:
            told.append(str(error))
            raise

    with pytest.raises(RuntimeError, match="it dies"):
        on_ranks(3, program)
    assert len(told) == 2
    assert all("rank 1 left" in text for text in told)

    def those_left(here: World) -> list[int]:
        run = Run(mega_batch=50, lr=0.01)
        run.loader.load_state_dict(states[-1])
        return run.epoch()

    seen = sorted(index for part in on_ranks(2, those_left) for index in part)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    assert seen == sorted(order[2 * 51 :].tolist())


def test_an_iteration_that_is_broken_off_is_merged_and_the_next_epoch_begins() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=100, replay=EVENLY[2])
        run.epoch(until=lambda: run.loader.merges == 1)
        seen = run.epoch()
        return seen, run.loader.state_dict()["epochs"]["epoch"]

    results = on_ranks(2, program)
    assert sorted(index for seen, _ in results for index in seen) == list(range(LENGTH))
    assert {epoch for _, epoch in results} == {2}


@pytest.mark.parametrize("drains", [False, True])
def test_a_broken_off_epoch_is_over_in_states_of_what_was_merged_since(drains: bool) -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=50, replay=EVENLY[2])
        for _ in run.loader:
            run.optimizer.step()
            if run.loader.merges >= 1:
                break
        if drains:
            run.loader.drain()
        resumed = Run(mega_batch=50)
        resumed.loader.load_state_dict(run.loader.state_dict())
        return resumed.epoch(), resumed.loader.state_dict()["epochs"]["epoch"]

    results = on_ranks(2, program)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0)).tolist()
    seen = sorted(index for seen, _ in results for index in seen)
    # What was computed since the merge is computed again.
    assert seen == (list(range(LENGTH)) if drains else sorted(order[51:]))
    assert {epoch for _, epoch in results} == {1 + drains}


def few_for_rank_1(number: int, total: int, sizes: Sequence[int]) -> list[list[range]]:
    """Return takes in which rank 1 has none of the second and of the third stretch."""
    if number in (1, 2):
        return [*by_speed([1.0])(number, total, sizes[:1]), []]
    return by_speed([1.0, 1.0])(number, total, sizes)


@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize("after", [2, 3])
def test_checkpoints_are_saved_within_an_epoch_and_resumed(
    density: float, after: int, tmp_path: Path
) -> None:
    """Also where a rank has no batch of a mega-batch, and so finds late that others save."""
    compression = hvd.Compression.gtopk(density=density)

    def first(here: World) -> Any:
        run = Run(compression, mega_batch=40, lr=0.01, replay=few_for_rank_1)
        seen: list[int] = []
        due, stand_ins = 1, 0
        for indices, x, y in run.loader:
            seen += indices.tolist() if run.loader.num_samples else []
            stand_ins += not run.loader.num_samples
            run.optimizer.zero_grad()
            ((x @ run.weight - y).square().mean() / 2).backward()
            run.optimizer.step()
            if run.loader.merges >= due:
                gtopk.save_checkpoint(tmp_path, None, run.optimizer, run.loader, due)
                due = run.loader.merges + 1
                if due > 4:
                    break
        return seen, stand_ins, run.weight.detach().clone()

    def then(here: World) -> Any:
        run = Run(compression, mega_batch=40, lr=0.01)
        gtopk.load_latest(tmp_path, None, run.optimizer, run.loader)
        return run.epoch(), run.weight.detach()

    saved = on_ranks(2, first)
    assert saved[1][1] > 0
    assert torch.equal(saved[0][2], saved[1][2])
    found = on_ranks(after, then)
    assert sorted(i for seen, *_ in saved + found for i in seen) == list(range(LENGTH))


def test_all_ranks_stop_within_an_epoch_by_its_merges() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=40, lr=0.01, replay=few_for_rank_1)
        for _ in run.loader:
            if run.loader.merges >= 1:
                run.loader.drain()
                break
        stood_in = run.loader.num_samples == 0
        return run.epoch(), stood_in, run.weight.detach()

    results = on_ranks(2, program)
    assert sorted(i for seen, *_ in results for i in seen) == list(range(LENGTH))
    assert [stood_in for _, stood_in, _ in results] == [False, True]
    assert torch.equal(results[0][2], results[1][2])


def test_drains_within_an_epoch_leave_every_sample_to_be_trained_with_once() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=40, lr=0.01, replay=EVENLY[2])
        seen, merges = [], 0
        for _ in range(2):
            for indices, x, y in run.loader:
                if run.loader.merges % 3 == 1 and merges < run.loader.merges:
                    run.loader.drain()  # before the step: the batch is handed out once more
                    merges = run.loader.merges
                    with pytest.raises(RuntimeError, match="without a batch in hand"):
                        run.optimizer.step()
                    continue
                seen += indices.tolist()
                run.optimizer.zero_grad()
                ((x @ run.weight - y).square().mean() / 2).backward()
                run.optimizer.step()
        return seen

    results = on_ranks(2, program)
    assert sorted(i for seen in results for i in seen) == sorted([*range(LENGTH)] * 2)


def test_a_rank_that_does_not_drain_is_an_error_on_every_rank() -> None:
    def program(here: World) -> str:
        run = Run(mega_batch=40, lr=0.01, replay=EVENLY[3])
        try:
            for _ in run.loader:
                if here.rank != 1:
                    run.loader.drain()
        except RuntimeError as error:
            return str(error)
        return "none"

    for error in on_ranks(3, program):
        assert "ranks [0, 2] called loader.drain() at loader.merges 1" in error
        assert "ranks [1] did not" in error


def test_a_replica_that_is_not_finite_is_everybodys_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=100, momentum=0.9, lr=0.01, replay=EVENLY[3])

        def spoil() -> bool:
            if here.rank == 1 and run.loader.merges == 1:
                with torch.no_grad():
                    run.weight.fill_(float("nan"))
            return False

        run.epoch(spoil)
        return run.loader.lost_replicas, bool(run.weight.isfinite().all()), run.weight.detach()

    results = on_ranks(3, program)
    assert [lost for lost, *_ in results] == [1, 1, 1]
    assert all(finite and torch.equal(weight, results[0][2]) for _, finite, weight in results)
    assert f"without some: the replica is not finite on rank 1; {BUFFERS_STAY}" in caplog.text

    def diverging(here: World) -> None:
        run = Run(mega_batch=30, distributed={"max_skipped_steps": 2})

        def spoil() -> bool:
            with torch.no_grad():
                run.weight.fill_(float("nan"))
            return False

        with pytest.raises(FloatingPointError, match="not finite in 3 merges in a row"):
            run.epoch(spoil)

    on_ranks(2, diverging)


def test_draining_puts_all_that_was_not_sent_into_the_model() -> None:
    def program(here: World) -> Any:
        run = Run(hvd.Compression.gtopk(density=0.3), mega_batch=50, replay=EVENLY[3])
        run.epoch()
        merge = run.loader.last_merge
        with run.loader.merged():
            center = run.weight.detach().clone()
        offset = merge.weights[here.rank] * (run.weight.detach() - center)
        kept = bool(offset.any())
        refused: list[str] = []

        def until() -> bool:
            try:
                run.loader.state_dict()
            except RuntimeError as error:
                refused.append(str(error))
            return False

        state = run.loader.state_dict()
        run.loader.drain()
        drained = run.weight.detach().clone()
        assert run.loader.state_dict()["replica"]["own"] == []
        run.epoch(until)
        assert all("take the checkpoint when loader.merges has grown" in text for text in refused)
        return center, offset, drained, state, kept and bool(refused)

    results = on_ranks(3, program)
    assert any(kept for *_, kept in results)
    expected = results[0][0] + sum(offset for _, offset, *_ in results)
    for _, _, drained, *_ in results:
        torch.testing.assert_close(drained, expected, rtol=1e-12, atol=1e-12)

    def on_fewer(here: World) -> None:
        run = Run(hvd.Compression.gtopk(density=0.3), mega_batch=50)
        with pytest.raises(ValueError, match=r"of 3 ranks.*here are 2; call loader.drain"):
            run.loader.load_state_dict(results[0][3])

    on_ranks(2, on_fewer)


def test_the_merged_model_is_saved_as_it_is_shown_and_nothing_unsent_is_lost() -> None:
    """Once, a state of then, or a drain, had replicas without what they had not sent."""

    def program(here: World) -> Any:
        run = Run(hvd.Compression.gtopk(density=0.3), mega_batch=50, replay=EVENLY[2])
        run.epoch()
        state = run.loader.state_dict()
        with run.loader.merged():
            within = run.loader.state_dict()
        weight = run.loader.last_merge.weights[here.rank]
        offset = torch.from_numpy(run.loader._replica.weighted_offset(weight))
        center = run.loader._replica.center[0].clone()
        for _ in run.loader:
            with run.loader.merged(), pytest.raises(RuntimeError, match=r"within loader\.merged"):
                run.optimizer.step()
        run.loader.load_state_dict(state)
        with run.loader.merged():
            run.loader.drain()
            shown = run.weight.detach().clone()
        return state["replica"], within["replica"], offset, center, shown, run.weight.detach()

    results = on_ranks(2, program)
    assert any(offset.any() for _, _, offset, *_ in results)
    expected = results[0][3] + sum(offset for _, _, offset, *_ in results)
    for state, within, _, _, shown, drained in results:
        assert state["own"]
        assert all(map(torch.equal, state["own"], within["own"]))
        torch.testing.assert_close(shown, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(shown, drained)


def test_what_replicas_cannot_do_is_said() -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"mega_batch": -1}, ValueError, "mega_batch must be at least 0, got -1"),
        ({"local_steps": 0}, ValueError, "local_steps must be at least 1, got 0"),
        ({"algorithm": "asgd"}, ValueError, "algorithm must be one of adaptive, k-step, elastic"),
        ({"batch_rule": "x"}, ValueError, "batch_rule must be one of multiplicative, published"),
        ({"merge_weights": "x"}, ValueError, "merge_weights must be one of updates, samples"),
        ({"perturbation": 1.0}, ValueError, r"perturbation must lie in \[0, 1\), got 1.0"),
        ({"merge_momentum": -0.1}, ValueError, r"merge_momentum must lie in \[0, 1\)"),
        ({"lr_scaling": "adascale"}, ValueError, "measures no noise"),
        ({"algorithm": "k-step", "replay": []}, ValueError, "hands out no batches to be replayed"),
        ({"interval": 3}, TypeError, "has no option 'interval'; it has global_batch"),
        ({"distributed": {"check_every": 5}}, ValueError, "it takes no check_every"),
        ({"distributed": {"global_clip_norm": 1.0}}, ValueError, "takes no global_clip_norm"),
        ({"distributed": {"backward_passes_per_step": 2}}, ValueError, "per_step=1, got 2"),
        (
            {"compression": hvd.Compression.gtopk(density=0.5, momentum_correction=0.9)},
            ValueError,
            "use momentum_correction=0",
        ),
        (
            {"compression": hvd.Compression.gtopk(density=0.5, adam_correction=(0.9, 0.99))},
            ValueError,
            "and adam_correction=None",
        ),
    ]

    def program(here: World) -> None:
        for options, kind, text in refused:
            with pytest.raises(kind, match=text):
                Run(**options)
        run = Run()
        with pytest.raises(ValueError, match="the state's 'abs'"):
            run.loader.load_state_dict({"mode": "abs"})
        assert len(run.loader) == 26

    on_ranks(1, program)


def test_ranks_that_differ_are_told() -> None:
    def other_options(here: World) -> None:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1: .*local_steps=9"):
            Run(local_steps=8 + here.rank)

    def other_models(here: World) -> None:
        run = Run()
        with torch.no_grad():
            run.weight += here.rank
        with pytest.raises(hvd.HorovodInternalError, match=r"'weight' has .*broadcast_parameters"):
            run.epoch()

    on_ranks(2, other_options)
    on_ranks(2, other_models)
