"""Mode "adaptive-sgd" on ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from gtopk.adaptive.model_averaging.options import STRATEGIES
from gtopk.adaptive.partitioning.cursor import by_speed
from gtopk.optim.step_checks import BUFFERS_KEPT
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.merging_run import EVENLY, LENGTH, Run, data
from tests.gtopk.adaptive.modelled_ranks import on_ranks


@pytest.mark.parametrize("algorithm", sorted(STRATEGIES))
def test_epoch_trains_every_sample_once_and_ranks_agree(algorithm: str) -> None:
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
    """Return the weights after training in one process; rates are proportional to batch sizes."""
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
def test_s_sgd_equals_single_process_on_the_global_batch(summed: bool) -> None:
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


def test_merged_model_is_weighted_mean_of_local_models() -> None:
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


def test_replayed_record_repeats_run_bitwise() -> None:
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


def test_record_of_a_resumed_run_can_be_replayed() -> None:
    """Regression: the record began at the state, but was replayed from the first stretch."""

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
        with pytest.raises(ValueError, match=r"lacks stretch 0: .* from a later state"):
            Run(replay=records[0], **options).epoch()

    on_ranks(2, program)


def test_batch_sizes_follow_speeds_and_learning_rates_follow_sizes() -> None:
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


def test_dead_worker_loses_only_samples_since_last_merge() -> None:
    states: list[dict[str, Any]] = []
    errors: list[str] = []

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
            errors.append(str(error))
            raise

    with pytest.raises(RuntimeError, match="it dies"):
        on_ranks(3, program)
    assert len(errors) == 2
    assert all("rank 1 left" in text for text in errors)

    def resume_on_survivors(here: World) -> list[int]:
        run = Run(mega_batch=50, lr=0.01)
        run.loader.load_state_dict(states[-1])
        return run.epoch()

    seen = sorted(index for part in on_ranks(2, resume_on_survivors) for index in part)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    assert seen == sorted(order[2 * 51 :].tolist())


def test_break_merges_replicas_and_ends_the_epoch() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=100, replay=EVENLY[2])
        run.epoch(until=lambda: run.loader.merges == 1)
        seen = run.epoch()
        return seen, run.loader.state_dict()["epochs"]["epoch"]

    results = on_ranks(2, program)
    assert sorted(index for seen, _ in results for index in seen) == list(range(LENGTH))
    assert {epoch for _, epoch in results} == {2}


def test_nonfinite_replica_is_excluded_on_every_rank_and_raises_if_it_persists(
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
    assert f"excludes replicas: those of ranks 1 are not finite; {BUFFERS_KEPT}" in caplog.text

    def diverging(here: World) -> None:
        run = Run(mega_batch=30, distributed={"max_skipped_steps": 2})

        def spoil() -> bool:
            with torch.no_grad():
                run.weight.fill_(float("nan"))
            return False

        state = run.loader.state_dict()
        for _ in range(2):  # stretches before a loaded state do not continue in later ones
            with pytest.raises(FloatingPointError, match="not finite in 3 merges in a row"):
                run.epoch(spoil)
            run.loader.load_state_dict(state)

    on_ranks(2, diverging)


def test_unsupported_options_of_mode_adaptive_sgd_raise() -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"mega_batch": -1}, ValueError, "mega_batch must be at least 0, got -1"),
        ({"local_steps": 0}, ValueError, "local_steps must be at least 1, got 0"),
        ({"algorithm": "asgd"}, ValueError, "algorithm must be one of adaptive, k-step, elastic"),
        ({"batch_rule": "x"}, ValueError, "batch_rule must be one of multiplicative, published"),
        ({"merge_weights": "x"}, ValueError, "merge_weights must be one of updates, samples"),
        ({"perturbation": 1.0}, ValueError, r"perturbation must lie in \[0, 1\), got 1.0"),
        ({"merge_momentum": -0.1}, ValueError, r"merge_momentum must lie in \[0, 1\)"),
        ({"lr_scaling": "adascale"}, ValueError, "measures no noise"),
        ({"algorithm": "k-step", "replay": []}, ValueError, "hands out fixed batches"),
        ({"interval": 3}, TypeError, "has no option 'interval'; it has global_batch"),
        ({"distributed": {"check_every": 5}}, ValueError, "it does not support check_every"),
        (
            {"distributed": {"global_clip_norm": 1.0}},
            ValueError,
            "does not support global_clip_norm",
        ),
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


def test_differing_options_or_models_raise() -> None:
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
