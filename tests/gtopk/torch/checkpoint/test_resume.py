"""A loaded run continues bit-identically; with other numbers of ranks, without losses."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

import gtopk.torch as hvd
from gtopk import CheckpointError, load_latest, save_checkpoint
from gtopk.optim.wrapped import checkpoint as optimizer_checkpoint
from tests.gtopk.adaptive.modelled_ranks import Prompt
from tests.gtopk.held import held
from tests.gtopk.torch.checkpoint.run import Run


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("saved_at", [1, 6, 11])
def test_resumed_run_is_bit_identical(ranks, tmp_path, saved_at, adam, asynchronous):
    def uninterrupted(rank):
        run = Run(adam).steps(saved_at)
        saving = run.save(tmp_path, saved_at, asynchronous=asynchronous)
        run.steps(14 - saved_at)
        saving.wait()
        return run.everything()

    def resumed(rank):
        run = Run(adam)
        found = run.load(tmp_path)
        assert (found.step, found.ranks) == (saved_at, 3)
        assert found.values == {"note": {"seen": saved_at}}
        return run.steps(14 - saved_at).everything()

    finished = ranks(3, uninterrupted)
    assert len({bits["1.running_mean"] for bits, *_ in finished}) == 3
    assert len({bits["0.weight"] for bits, *_ in finished}) == 1
    assert ranks(3, resumed) == finished


@pytest.mark.parametrize(
    ("compression", "momentum"),
    [
        (hvd.Compression.none, 0.9),
        (hvd.Compression.fp16, 0.9),
        (hvd.Compression.gtopk(density=0.1, momentum_correction=0.5, warmup_steps=6), 0.0),
        (hvd.Compression.oktopk(density=0.2, values="bf16"), 0.9),
        (hvd.Compression.gtopk(density=0.1, adam_correction=(0.9, 0.99)), 0.0),
    ],
    ids=repr,
)
def test_resumed_run_is_bit_identical_with_each_compression(ranks, tmp_path, compression, momentum):
    def uninterrupted(rank):
        run = Run(compression=compression, momentum=momentum).steps(5)
        run.save(tmp_path, 5)
        return run.steps(4).everything()

    def resumed(rank):
        run = Run(compression=compression, momentum=momentum)
        run.load(tmp_path)
        return run.steps(4).everything()

    assert ranks(2, uninterrupted) == ranks(2, resumed)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 5), (2, 1)])
def test_sum_of_residuals_is_conserved_on_another_number_of_ranks(
    ranks, tmp_path, caplog, before, after
):
    def first(rank):
        run = Run().steps(3)
        run.save(tmp_path, 3)
        return held(run.optimizer).astype(np.float64), copy.deepcopy(run.model.state_dict())

    def then(rank):
        run = Run()
        run.load(tmp_path)
        found = held(run.optimizer).astype(np.float64), copy.deepcopy(run.model.state_dict())
        run.steps(1)
        return found

    saved = ranks(before, first)
    with caplog.at_level(logging.INFO, "gtopk"):
        found = ranks(after, then)
    total = sum(residual for residual, _ in saved)
    assert np.abs(total).max() > 0
    np.testing.assert_allclose(sum(residual for residual, _ in found), total, rtol=1e-6, atol=1e-8)
    for _, state in found:
        assert all(torch.equal(state[name], saved[0][1][name]) for name in state)
    messages = [r.getMessage() for r in caplog.records if " residual" in r.getMessage()]
    assert len(messages) == after
    for rank in range(after):
        old_ranks = [str(r) for r in range(before) if r % after == rank]
        s = "s" * (len(old_ranks) > 1)
        words = f"rank {rank} takes over the residual{s} of old rank{s} {' and '.join(old_ranks)}"
        if not old_ranks:
            words = f"rank {rank} begins without a residual: other ranks have those of the {before}"
        assert any(words in text for text in messages), messages


def test_error_says_that_a_checkpoint_is_of_another_model(ranks, tmp_path, capfd):
    def program(rank):
        for wide in (4, 5):
            model = torch.nn.Linear(wide, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            if wide == 4:
                save_checkpoint(tmp_path, model, optimizer, step=1)
                continue
            with pytest.raises(RuntimeError, match="this checkpoint is of another model") as caught:
                load_latest(tmp_path, model, optimizer)
            assert str(tmp_path) in str(caught.value)
            assert "size mismatch" in str(caught.value)

    ranks(2, program)
    assert "resuming from" not in capfd.readouterr().err


@pytest.mark.parametrize("saved", [True, False])
def test_error_advises_model_module_when_only_one_side_is_wrapped(ranks, tmp_path, saved):
    def program(rank):
        model = torch.nn.Linear(2, 1)
        wrapped = torch.nn.Module()
        wrapped.module = model  # as in DistributedDataParallel
        first, then = (wrapped, model) if saved else (model, wrapped)
        save_checkpoint(tmp_path, first, None, step=1)
        with pytest.raises(RuntimeError, match=r"of another model; save and load model\.module"):
            load_latest(tmp_path, then)

    ranks(2, program)


def lose_own(folder, numbers="*"):
    """Delete a host's own folder, or files in it."""
    for path in folder.glob(f"checkpoint-{numbers}-step-*/rank-3-of-4.json"):
        path.unlink()


def damage_own(folder):
    for path in folder.glob("*/rank-3-of-4.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("lose", [lose_own, damage_own])
@pytest.mark.parametrize("after", [3, 4, 1])
def test_missing_ranks_report_resumes_without_the_lost_residual(
    ranks, tmp_path, caplog, after, lose
):
    """The sum of the others' residuals is kept, and the missing rank is reported."""

    def first(rank):
        run = Run().steps(2)
        run.save(tmp_path, 2)
        run.steps(2).save(tmp_path, 4)
        return held(run.optimizer).astype(np.float64), copy.deepcopy(run.model.state_dict())

    def then(rank):
        run = Run()
        with pytest.raises(CheckpointError) as error:
            run.load(tmp_path)
        assert 'load_latest(..., missing_ranks="report")' in str(error.value)
        found = run.load(tmp_path, missing_ranks="report")
        assert (found.step, found.ranks, found.missing) == (4, 4, (3,))
        residual = held(run.optimizer).astype(np.float64)
        weight = run.model[0].weight.clone()
        run.steps(2).save(tmp_path, 6)
        again = Run()
        assert again.load(tmp_path).missing == ()
        return residual, weight, run.everything() == again.everything()

    saved = ranks(4, first)
    lose(tmp_path)
    found = ranks(after, then)
    total = sum(residual for residual, _ in saved[:3])
    assert np.abs(total).max() > 0
    assert np.abs(saved[3][0]).max() > 0
    np.testing.assert_allclose(sum(held for held, *_ in found), total, rtol=1e-6, atol=1e-8)
    assert all(torch.equal(weight, saved[0][1]["0.weight"]) for _, weight, _ in found)
    assert all(is_same for *_, is_same in found)
    messages = [
        r.getMessage() for r in caplog.records if "lacks the own parts of" in r.getMessage()
    ]
    assert len(messages) == after
    assert messages[0].endswith(
        "lacks the own parts of ranks [3] of 4: their residuals are lost, and the run "
        "continues without them"
    )


def test_complete_checkpoint_is_preferred_to_a_newer_one_lacking_ranks(ranks, tmp_path):
    def first(rank):
        save_checkpoint(tmp_path, None, None, step=1)
        save_checkpoint(tmp_path, None, None, step=2)

    def then(rank):
        found = load_latest(tmp_path, None, generators=False, missing_ranks="report")
        return found.step, found.missing

    ranks(4, first)
    lose_own(tmp_path, "00000002")
    assert ranks(2, then) == [(1, ())] * 2
    lose_own(tmp_path)
    assert ranks(2, then) == [(2, (3,))] * 2
    for path in tmp_path.glob("checkpoint-00000002-step-2/rank-[12]-of-4.json"):
        path.unlink()  # writing it was interrupted
    assert ranks(2, then) == [(1, (3,))] * 2
    for path in tmp_path.glob("checkpoint-*/all-of-4.json"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        ranks(2, then)
    with pytest.raises(ValueError, match="missing_ranks must be 'error' or 'report', got 'skip'"):
        ranks(2, lambda rank: load_latest(tmp_path, None, missing_ranks="skip"))


def test_loaders_residuals_are_conserved_when_ranks_change_hosts(ranks, tmp_path):
    """Each host has its own folder; one now has three of four ranks instead of two."""

    def open_run():
        run = Run(momentum=0.0, mode="abs", micro_batch=4)
        run.loader.rounds._wire = Prompt(run.loader.rounds._wire)
        return run

    def held_by(run):
        return run.loader.state_dict()["residual"].double()

    def first(rank):
        run = open_run()
        for x, y in run.loader:
            (run.model(x) - y).square().mean().backward()
            run.optimizer.step()
            if run.loader.round >= 1:
                save_checkpoint(tmp_path / "aabb"[rank], run.model, run.optimizer, run.loader)
                return held_by(run)
        raise AssertionError("no round was reached")

    def then(homes):
        def program(rank):
            run, folder = open_run(), tmp_path / homes[rank]
            assert load_latest(folder, run.model, run.optimizer, run.loader, generators=False)
            return held_by(run)

        return program

    saved = ranks(4, first)
    assert all(map(torch.equal, saved, ranks(4, then("aabb"))))
    moved = ranks(4, then("aaab"))
    assert sum(saved).abs().max() > 0
    torch.testing.assert_close(sum(moved), sum(saved), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("after", [2, 3, 1])
def test_loaders_residuals_and_samples_are_conserved_within_an_epoch(ranks, tmp_path, after):
    def held_by(run):
        return {n: run.loader.state_dict()[n].double() for n in ("residual", "velocity")}

    def open_run():
        compression = hvd.Compression.gtopk(density=0.2, momentum_correction=0.5)
        run = Run(compression=compression, momentum=0.0, mode="abs", micro_batch=4)
        rounds = run.loader.rounds
        rounds._wire = Prompt(rounds._wire)  # otherwise the epoch may end before a round
        return run

    def steps(run, folder=None):
        """Save at the given round; return the sums of the samples that count."""
        seen = []
        for x, y in run.loader:
            seen += x.sum(1).tolist() if run.loader.num_samples else []
            (run.model(x) - y).square().mean().backward()
            run.optimizer.step()
            if folder and run.loader.round >= 1:
                save_checkpoint(folder, run.model, run.optimizer, run.loader)
                break
        return seen

    def first(rank):
        run = open_run()
        return steps(run, tmp_path), held_by(run)

    def then(rank):
        run = open_run()
        assert load_latest(tmp_path, run.model, run.optimizer, run.loader, generators=False)
        return held_by(run), steps(run)

    saved, found = ranks(2, first), ranks(after, then)
    for name in ("residual", "velocity"):
        before, now = [held[name] for _, held in saved], [held[name] for held, _ in found]
        assert sum(before).abs().max() > 0
        if after == 2:
            assert all(map(torch.equal, before, now))
        torch.testing.assert_close(sum(now), sum(before), rtol=1e-6, atol=1e-8)
    seen = [x for part, _ in saved for x in part] + [x for _, part in found for x in part]
    assert sorted(seen) == sorted(torch.linspace(-1, 1, 120).reshape(60, 2).sum(1).tolist())


@pytest.mark.parametrize("after", [2, 3])
def test_residuals_in_a_saved_dict_are_conserved_on_other_ranks(ranks, tmp_path, after):
    """Like the hook of DistributedDataParallel, with a state created with the model."""

    def first(rank):
        held = {"weight": {"residual": torch.tensor([1.0, 10.0**rank])}}
        part = {"format": 1, "ranks": 2, "steps": 5, "lanes": [], "held": {rank: held}}
        save_checkpoint(tmp_path, torch.nn.Linear(1, 1), None, residuals=part)

    def then(rank):
        part = load_latest(tmp_path, torch.nn.Linear(1, 1)).values["residuals"]
        held = optimizer_checkpoint.residuals_for(part, rank, after)
        return held["weight"]["residual"] if held else torch.zeros(2)

    ranks(2, first)
    assert sum(ranks(after, then)).tolist() == [2.0, 11.0]


class Hook:
    """An object with residuals in its state, like FSDP's replicas."""

    def __init__(self):
        self.steps, self.residual = 0, torch.zeros(2)

    def state_dict(self):
        held = {"weight": {"residual": self.residual}}
        return {
            "format": 1,
            "ranks": hvd.size(),
            "steps": self.steps,
            "lanes": [],
            "held": {hvd.rank(): held},
        }

    def load_state_dict(self, state):
        self.steps = state["steps"]
        held = optimizer_checkpoint.residuals_for(state, hvd.rank(), hvd.size())
        self.residual = held["weight"]["residual"] if held else torch.zeros(2)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_residuals_of_a_saved_object_are_conserved_on_other_ranks(
    ranks, tmp_path, caplog, after, asynchronous
):
    def first(rank):
        hook = Hook()
        hook.steps, hook.residual = 5, torch.tensor([1.0, 10.0**rank])
        saving = save_checkpoint(tmp_path, None, None, asynchronous=asynchronous, replicas=hook)
        if asynchronous:
            hook.residual.zero_()
            saving.wait()

    def then(rank):
        hook = Hook()
        assert load_latest(tmp_path, None, generators=False, replicas=hook).values == {}
        part = load_latest(tmp_path, None, generators=False).values["replicas"]
        assert optimizer_checkpoint.is_part(part)
        assert hook.steps == 5
        return hook.residual

    ranks(2, first)
    assert sum(ranks(after, then)).tolist() == [2.0, 11.0]
    assert "lost" not in caplog.text


def test_random_number_generators_resume_on_real_ranks(mpirun, tmp_path):
    job = mpirun(2, "checkpoints.py", str(tmp_path))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("went on from step 4") == 2
