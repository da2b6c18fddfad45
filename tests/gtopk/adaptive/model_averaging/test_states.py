"""Mode "adaptive-sgd": states, checkpoints and drains, between epochs and within them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk.adaptive.partitioning.cursor import by_speed
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.merging_run import EVENLY, LENGTH, Run
from tests.gtopk.adaptive.modelled_ranks import on_ranks


@pytest.mark.parametrize("algorithm", ["adaptive", "elastic"])
@pytest.mark.parametrize("density", [1.0, 0.4])
def test_run_resumes_from_checkpoint_bitwise(algorithm: str, density: float) -> None:
    compression = hvd.Compression.gtopk(density=density)
    options: dict[str, Any] = {"algorithm": algorithm, "mega_batch": 60, "merge_momentum": 0.5}
    if algorithm == "adaptive":
        options["replay"] = by_speed([3.0, 1.0])

    def program(here: World) -> Any:
        uninterrupted = Run(compression, **options)
        uninterrupted.epoch()
        state, optimizer = uninterrupted.loader.state_dict(), uninterrupted.optimizer.state_dict()
        seen = uninterrupted.epoch()
        resumed = Run(compression, **options)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.loader.load_state_dict(state)
        assert resumed.epoch() == seen
        assert (
            resumed.loader.state_dict()["batches"] == uninterrupted.loader.state_dict()["batches"]
        )
        return torch.equal(uninterrupted.weight, resumed.weight)

    assert on_ranks(2, program) == [True, True]


def test_state_between_epochs_can_be_evaluated_and_drained_after_loading() -> None:
    """Both in a new loader without a replica, and in one that has trained since."""
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


def test_loading_state_clears_drains_called_on_some_ranks_only() -> None:
    """After the state is loaded, no rank drains or gets a placeholder batch."""

    def program(here: World) -> None:
        run, new = (Run(mega_batch=60, replay=EVENLY[2]) for _ in range(2))
        run.epoch()
        state = run.loader.state_dict()

        def drain_on_rank_0() -> None:
            for _ in run.loader:
                if here.rank == 0:
                    run.loader.drain()

        with pytest.raises(RuntimeError, match=r"ranks \[0\] called loader.drain\(\)"):
            drain_on_rank_0()
        for each in (run, new):
            each.loader.load_state_dict(state)
            assert not each.loader.drain_wanted
        assert run.epoch() == new.epoch()
        assert torch.equal(run.weight, new.weight)

    on_ranks(2, program)


def test_rejected_state_within_epoch_changes_nothing() -> None:
    def program(here: World) -> None:
        compression = hvd.Compression.gtopk(density=0.4)
        run, other = (Run(compression, mega_batch=60, replay=EVENLY[2]) for _ in range(2))
        run.epoch()
        other.epoch()
        state = {**run.loader.state_dict(), "ranks": 3}

        def refused() -> bool:
            with pytest.raises(ValueError, match="the state is of 3 ranks"):
                run.loader.load_state_dict(state)
            return False

        assert run.epoch(until=refused) == other.epoch()
        assert torch.equal(run.weight, other.weight)

    on_ranks(2, program)


def test_loader_returns_to_state_before_first_epoch() -> None:
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


def test_checkpoint_within_mega_batch_holds_last_merge() -> None:
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


@pytest.mark.parametrize("drains", [False, True])
def test_state_after_break_ends_epoch_only_if_drained(drains: bool) -> None:
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
    # Work since the merge is repeated.
    assert seen == (list(range(LENGTH)) if drains else sorted(order[51:]))
    assert {epoch for _, epoch in results} == {1 + drains}


def few_for_rank_1(number: int, total: int, sizes: Sequence[int]) -> list[list[range]]:
    """Return takes in which rank 1 has no part of the second and third stretch."""
    if number in (1, 2):
        return [*by_speed([1.0])(number, total, sizes[:1]), []]
    return by_speed([1.0, 1.0])(number, total, sizes)


@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize("after", [2, 3])
def test_run_resumes_from_checkpoint_saved_within_epoch(
    density: float, after: int, tmp_path: Path
) -> None:
    """Even if a rank has no batch in a mega-batch, and so learns late that others save."""
    compression = hvd.Compression.gtopk(density=density)

    def save(here: World) -> Any:
        run = Run(compression, mega_batch=40, lr=0.01, replay=few_for_rank_1)
        seen: list[int] = []
        due, placeholders = 1, 0
        for indices, x, y in run.loader:
            seen += indices.tolist() if run.loader.num_samples else []
            placeholders += not run.loader.num_samples
            run.optimizer.zero_grad()
            ((x @ run.weight - y).square().mean() / 2).backward()
            run.optimizer.step()
            if run.loader.merges >= due:
                gtopk.save_checkpoint(tmp_path, None, run.optimizer, run.loader, due)
                due = run.loader.merges + 1
                if due > 4:
                    break
        return seen, placeholders, run.weight.detach().clone()

    def resume(here: World) -> Any:
        run = Run(compression, mega_batch=40, lr=0.01)
        gtopk.load_latest(tmp_path, None, run.optimizer, run.loader)
        return run.epoch(), run.weight.detach()

    saved = on_ranks(2, save)
    assert saved[1][1] > 0
    assert torch.equal(saved[0][2], saved[1][2])
    found = on_ranks(after, resume)
    assert sorted(i for seen, *_ in saved + found for i in seen) == list(range(LENGTH))


def test_ranks_stop_together_within_epoch_after_a_merge() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=40, lr=0.01, replay=few_for_rank_1)
        for _ in run.loader:
            if run.loader.merges >= 1:
                run.loader.drain()
                break
        got_placeholder = run.loader.num_samples == 0
        return run.epoch(), got_placeholder, run.weight.detach()

    results = on_ranks(2, program)
    assert sorted(i for seen, *_ in results for i in seen) == list(range(LENGTH))
    assert [got_placeholder for _, got_placeholder, _ in results] == [False, True]
    assert torch.equal(results[0][2], results[1][2])


def test_drains_within_epoch_keep_every_sample_trained_once() -> None:
    def program(here: World) -> Any:
        run = Run(mega_batch=40, lr=0.01, replay=EVENLY[2])
        seen, merges = [], 0
        for _ in range(2):
            for indices, x, y in run.loader:
                if run.loader.merges % 3 == 1 and merges < run.loader.merges:
                    run.loader.drain()  # before the step, so the batch is handed out again
                    merges = run.loader.merges
                    with pytest.raises(RuntimeError, match="without a current batch"):
                        run.optimizer.step()
                    continue
                seen += indices.tolist()
                run.optimizer.zero_grad()
                ((x @ run.weight - y).square().mean() / 2).backward()
                run.optimizer.step()
        return seen

    results = on_ranks(2, program)
    assert sorted(i for seen in results for i in seen) == sorted([*range(LENGTH)] * 2)


def test_drain_on_some_ranks_only_raises_on_every_rank() -> None:
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


def test_drain_adds_all_unsent_offsets_to_the_model() -> None:
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
        with pytest.raises(ValueError, match=r"of 3 ranks.*this job has 2; call loader.drain"):
            run.loader.load_state_dict(results[0][3])

    on_ranks(2, on_fewer)


def test_state_and_drain_within_merged_keep_unsent_offsets() -> None:
    """Regression: a state or a drain within `merged` lost the unsent parts of the replicas."""

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
