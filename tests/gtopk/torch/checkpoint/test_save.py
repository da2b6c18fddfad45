"""Saving: which ranks write what, where, and when, and the errors if they cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk import CheckpointError, load_latest, save_checkpoint
from gtopk.runtime.world import world
from gtopk.torch.checkpoint import save
from gtopk.torch.checkpoint.dcp import Reader
from tests.gtopk.torch.checkpoint.run import Run
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[4]


def test_load_latest_returns_none_without_a_checkpoint(ranks, tmp_path):
    assert ranks(2, lambda rank: Run().load(tmp_path / "new")) == [None, None]


def test_plain_model_optimizer_and_sampler_are_restored(ranks, tmp_path):
    def program(rank):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        sampler = hvd.elastic.ElasticSampler(range(12))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        sampler.record_batch(0, 2)
        save_checkpoint(tmp_path, model, optimizer, sampler, 7)
        other = torch.nn.Linear(2, 2)
        again = torch.optim.Adam(other.parameters())
        resumed = hvd.elastic.ElasticSampler(range(12))
        assert load_latest(tmp_path, other, again, resumed).step == 7
        assert repr(again.state_dict()) == repr(optimizer.state_dict())
        assert resumed.processed_num == 2 * hvd.size()
        assert load_latest(tmp_path, torch.nn.Linear(2, 2)).values == {}  # for inspection
        with pytest.raises(ValueError, match="holds no 'scheduler', only nothing"):
            load_latest(tmp_path, model, scheduler=optimizer)

    ranks(1, program)


@pytest.mark.parametrize("size", [2, 3])
def test_step_count_of_each_rank_is_restored_besides_the_scripts_step(ranks, tmp_path, size):
    def first(rank):
        world.current().step = 40 + rank  # as in modes with independent steps
        save_checkpoint(tmp_path, None, None, step=2)

    def then(rank):
        return load_latest(tmp_path, None).step, world.current().step

    ranks(2, first)
    own = [40, 41] if size == 2 else [40] * size
    assert ranks(size, then) == [(2, step) for step in own]


def test_each_rank_saves_tensors_that_differ_only_in_shape_or_dtype(ranks, tmp_path):
    of_ranks = [
        {"shape": torch.zeros(2, 3), "none": torch.zeros(0, 4), "dtype": torch.zeros(1)},
        {"shape": torch.zeros(3, 2), "none": torch.zeros(4, 0), "dtype": torch.zeros(1).int()},
    ]

    def first(rank):
        save_checkpoint(tmp_path, None, None, **of_ranks[rank])

    def then(rank):
        return load_latest(tmp_path, None, generators=False).values

    ranks(2, first)
    for loaded, saved in zip(ranks(2, then), of_ranks, strict=True):
        assert {n: (t.dtype, t.shape) for n, t in loaded.items()} == {
            n: (t.dtype, t.shape) for n, t in saved.items()
        }


def test_buffers_of_any_strides_are_saved(ranks, tmp_path):
    def program(rank):
        def make(value):
            model = torch.nn.Linear(2, 2)
            four = torch.full((4,), value)
            for name, buffer in (("one", four[::4]), ("none", four[4::4]), ("some", four[::2])):
                model.register_buffer(name, buffer)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        model, optimizer = make(3.0)
        save_checkpoint(tmp_path, model, optimizer)
        other, again = make(0.0)
        load_latest(tmp_path, other, again)
        for name, buffer in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], buffer)

    ranks(2, program)


def test_loaded_optimizer_state_has_the_strides_of_its_parameter(ranks, tmp_path):
    def begin():
        model = torch.nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
        inner = [torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.1, 0.2, 0.3)]
        return model, hvd.DistributedOptimizer(inner[0]), inner[1], inner[2]

    def program(rank):
        model, ours, plain, other = begin()
        for optimizer in (ours, plain, other):
            optimizer.zero_grad()
            model(torch.ones(1, 3, 6, 6)).square().sum().backward()
            optimizer.step()
        save_checkpoint(tmp_path, model, plain, None, 1, ours=ours, other=other)
        model, *loaded = begin()
        load_latest(tmp_path, model, loaded[1], ours=loaded[0], other=loaded[2])
        for before, optimizer in zip((ours, plain, other), loaded, strict=True):
            (was, *_), (state, *_) = before.state.values(), optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[name], was[name])
                assert state[name].stride() == model.weight.stride()

    ranks(1, program)


def test_parameters_that_differ_between_ranks_are_saved_and_logged(ranks, tmp_path, caplog):
    def program(rank, load):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(0)
            model.bias.fill_(rank)
        if load:
            model.bias.data.fill_(-1)
            load_latest(tmp_path, model, generators=False)
        else:
            save_checkpoint(tmp_path, model, None)
        return model.bias.tolist()

    ranks(3, lambda rank: program(rank, False))
    assert [r.getMessage() for r in caplog.records] == [
        "parameters differ between ranks, so each rank saves its own: "
        "rank 1: model.bias; rank 2: model.bias"
    ]
    assert ranks(3, lambda rank: program(rank, True)) == [[rank] * 2 for rank in range(3)]
    assert ranks(2, lambda rank: program(rank, True)) == [[0, 0]] * 2


def test_local_sgd_replicas_that_differ_are_saved_without_a_warning(ranks, tmp_path, caplog):
    """Within a round of LocalSGD; parts that it does not train should still be equal."""

    def program(rank):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        model[1].requires_grad_(False)
        optimizer = gtopk.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=None)
        optimizer.outer_step()
        for _ in range(rank):  # rank 0's replica is still at the round's start
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        save_checkpoint(tmp_path, model, optimizer, step=1)
        save_checkpoint(tmp_path, model, None, step=1, another=optimizer)
        with torch.no_grad():
            model[1].bias.fill_(rank)
        save_checkpoint(tmp_path, model, optimizer, step=2)
        return model[0].weight.tolist()

    weights = ranks(3, program)
    assert len(set(map(str, weights))) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "parameters differ between ranks, so each rank saves its own: "
        "rank 1: model.1.bias; rank 2: model.1.bias"
    ]


@pytest.mark.parametrize("number", [np.int64(5), np.array(5), torch.tensor(5)], ids=repr)
def test_step_and_keep_may_be_integers_of_numpy_or_torch(ranks, tmp_path, number):
    def program(rank):
        model = torch.nn.Linear(1, 1)
        for _ in range(7):
            save_checkpoint(tmp_path, model, None, step=number, keep=number)
        return load_latest(tmp_path, model).step

    assert [(step, type(step)) for step in ranks(2, program)] == [(5, int)] * 2
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    "number",
    [100.0, np.float64(3), torch.tensor(7.0), True, np.True_, torch.tensor(True), "3", None],
    ids=repr,
)
def test_step_or_keep_that_is_no_integer_is_refused_before_writing(ranks, tmp_path, number):
    def program(rank):
        model = torch.nn.Linear(1, 1)
        for name in ("step", "keep"):
            message = f"{name} must be an integer, got {number!r}; count in integers, or pass int("
            with pytest.raises(TypeError, match=re.escape(message)):
                save_checkpoint(tmp_path / "new", model, None, **{name: number})

    ranks(2, program)
    assert list(tmp_path.iterdir()) == []


def test_save_at_different_steps_raises_and_writes_nothing(ranks, tmp_path):
    def program(rank):
        model = torch.nn.Linear(1, 1)
        with pytest.raises(
            ValueError, match=r"step must be the same on all ranks, got \[0, 1, 2\] by rank"
        ):
            save_checkpoint(tmp_path, model, None, step=rank)
        assert list(tmp_path.iterdir()) == []
        hvd.barrier()
        save_checkpoint(tmp_path, model, None, step=4)
        return load_latest(tmp_path, model).step

    assert ranks(3, program) == [4] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_paths_to_a_folder_are_the_same_folder(ranks, tmp_path, monkeypatch, asynchronous):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(real)
    link, around, here = tmp_path / "link", "../real", "."

    def program(rank):
        model = torch.nn.Linear(1, 1)
        for step, folder in enumerate([real, link, link, link, real, around, here]):
            save_checkpoint(folder, model, None, step=step, asynchronous=asynchronous)
        return [load_latest(folder, model).step for folder in (link, real, around, here)]

    assert ranks(2, program) == [[6] * 4] * 2
    names = sorted(path.name for path in real.iterdir())
    assert names == ["checkpoint-00000006-step-5", "checkpoint-00000007-step-6"]


def test_unusable_path_raises_on_every_rank(ranks, tmp_path):
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")

    def program(rank):
        with pytest.raises(
            CheckpointError, match=r"cannot be created or listed.* rank 0 .* rank 1 "
        ):
            save_checkpoint(tmp_path / "one", torch.nn.Linear(1, 1), None)

    ranks(2, program)


def test_empty_path_is_not_the_current_folder(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def program(rank):
        run = Run()
        for call in (save_checkpoint, load_latest):
            with pytest.raises(ValueError, match="folder must be a path, got ''"):
                call("", run.model, run.optimizer)

    ranks(1, program)
    assert not [*tmp_path.iterdir()]


def test_path_of_a_single_checkpoint_is_refused(ranks, tmp_path):
    """As `save_checkpoint` returns it; a run would begin afresh, unnoticed."""

    def program(rank):
        model = torch.nn.Linear(1, 1)
        path = save_checkpoint(tmp_path, model, None).path
        for call in (lambda: load_latest(path, model), lambda: Reader(path)):
            with pytest.raises(ValueError, match=f"is one checkpoint; pass .* '{tmp_path}'$"):
                call()

    ranks(1, program)


def test_failed_save_is_named_on_every_rank_and_training_continues(ranks, tmp_path):
    """The disk is full on one rank, and later has room again."""

    def program(rank):
        run = Run().steps(2)
        run.save(tmp_path, 2)
        blocker = tmp_path / "checkpoint-00000002-step-3" / "rank-1-of-3.safetensors.part"
        if rank == 1:
            blocker.parent.mkdir()
            blocker.symlink_to("/dev/full")
        hvd.barrier()
        with pytest.raises(CheckpointError) as error:
            run.steps(1).save(tmp_path, 3)
        run.steps(1).save(tmp_path, 4)
        return str(error.value)

    errors = ranks(3, program)
    assert len(set(errors)) == 1
    assert re.search(r"rank 1 \(host .*\): .*No space left.*/rank-1-of-3\.safetensors'", errors[0])
    assert errors[0].endswith("checkpoint 1 is whole")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-00000001-step-2", "checkpoint-00000003-step-4"]
    assert ranks(3, lambda rank: Run().load(tmp_path).step) == [4] * 3


def test_invalid_arguments_of_save_are_refused_on_every_rank(ranks, tmp_path):
    def program(rank):
        model = torch.nn.Linear(1, 1)
        hook = program if rank == 1 else None
        with pytest.raises(CheckpointError, match=r"rank 1 \(host .*\): TypeError: others\.hook: "):
            save_checkpoint(tmp_path, model, None, hook=hook)
        with pytest.raises(
            CheckpointError, match=r"loader must have state_dict.*got list; pass None"
        ):
            save_checkpoint(tmp_path, model, None, [1])
        with pytest.raises(CheckpointError, match=r"model must be a torch\.nn\.Module, got SGD"):
            save_checkpoint(tmp_path, torch.optim.SGD(model.parameters()), model)
        with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
            save_checkpoint(tmp_path, model, None, keep=0)
        with pytest.raises(ValueError, match="step must be at least 0, got -1"):
            save_checkpoint(tmp_path, model, None, step=-1)

    ranks(2, program)
    assert list(tmp_path.iterdir()) == []


def test_asynchronous_save_holds_the_state_at_the_call(ranks, tmp_path, monkeypatch):
    """Training continues at once; the next save, or `wait`, reports the outcome."""
    gate = threading.Event()

    def later(task):
        outcome: Future[str] = Future()

        def write():
            gate.wait()
            outcome.set_result(task())

        threading.Thread(target=write).start()
        return outcome

    monkeypatch.setattr(save, "_in_thread", later)

    def program(rank):
        run = Run().steps(2)
        saving = run.save(tmp_path, 2, asynchronous=True)
        before = run.model[0].weight.clone()
        run.steps(2)
        assert not torch.equal(before, run.model[0].weight)
        hvd.barrier()
        gate.set()
        assert saving.wait() == saving.path == saving.wait()
        assert saving.path.name == "checkpoint-00000001-step-2"
        other = Run()
        other.load(tmp_path)
        assert torch.equal(before, other.model[0].weight)

    ranks(2, program)


def test_next_save_reports_a_failed_asynchronous_one_and_is_written(ranks, tmp_path):
    """The next save may be the last one of the job, and the disk may have room again."""

    def program(rank):
        run = Run().steps(1)
        run.save(tmp_path, 1)
        if rank == 0:
            (tmp_path / "checkpoint-00000002-step-2").touch()
        hvd.barrier()
        saving = run.save(tmp_path, 2, asynchronous=True)
        words = r"checkpoint 2 .*rank 0 .*rank 1 .* 1 is whole; checkpoint-00000003-step-3 is whole"
        with pytest.raises(CheckpointError, match=words):
            run.save(tmp_path, 3)
        with pytest.raises(CheckpointError, match="checkpoint 2"):
            saving.wait()
        assert run.load(tmp_path).step == 3
        run.save(tmp_path, 4, keep=1)

    ranks(2, program)
    shutil.rmtree(tmp_path / "checkpoint-00000004-step-4")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000002-step-2"]


def test_error_reported_by_wait_is_not_raised_again(ranks, tmp_path):
    def program(rank):
        (tmp_path / "checkpoint-00000001-step-1").touch()
        failing = save_checkpoint(tmp_path, None, None, step=1, asynchronous=True)
        with pytest.raises(CheckpointError, match="checkpoint 1 cannot be written"):
            failing.wait()
        saving = save_checkpoint(tmp_path, None, None, step=2)
        assert saving.wait().name == "checkpoint-00000002-step-2"

    ranks(2, program)


def test_load_works_after_a_failed_asynchronous_save(ranks, tmp_path, caplog):
    def program(rank):
        save_checkpoint(tmp_path, None, None, step=1)
        (tmp_path / "checkpoint-00000002-step-2").touch()
        hvd.barrier()
        failing = save_checkpoint(tmp_path, None, None, step=2, asynchronous=True)
        assert load_latest(tmp_path, None).step == 1
        with pytest.raises(CheckpointError, match="checkpoint 2 cannot be written"):
            failing.wait()

    ranks(2, program)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2
    assert re.search(r"^checkpoint 2 cannot .* 1 is whole; loading the newest whole", warnings[0])


def test_failed_save_after_a_failed_asynchronous_one_reports_both(ranks, tmp_path):
    def program(rank):
        for number in (1, 2):
            (tmp_path / f"checkpoint-0000000{number}-step-{number}").touch()
        model = torch.nn.Linear(1, 1)
        save_checkpoint(tmp_path, model, None, step=1, asynchronous=True)
        with pytest.raises(CheckpointError, match="checkpoint 2 cannot be written") as error:
            save_checkpoint(tmp_path, model, None, step=2)
        assert "checkpoint 1 cannot be written" in str(error.value.__context__)
        save_checkpoint(tmp_path, model, None, step=3, asynchronous=True).wait()

    ranks(1, program)


@pytest.mark.timeout(200)
def test_last_checkpoint_is_complete_whenever_its_writer_is_killed(tmp_path):
    """It is of the last completed save, or of the next."""
    program, killed = ROOT / "tests" / "programs" / "checkpoint_killed_writer.py", 60
    child = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(killed)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
    )
    assert child.returncode == 0, child.stderr
    some_left, new, deeds = map(int, child.stdout.split())
    # Otherwise the kills did not cover the relevant moments.
    assert deeds >= 10
    assert some_left >= 3
    assert new >= 1


@contextmanager
def without_rights():
    """If this is root, become a user without root's rights."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def open_path():
    """Return a folder that every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_read_only_folder_is_loaded_from_and_named_when_saving(ranks, open_path):
    folder = open_path / "saved"

    def program(rank):
        model = torch.nn.Linear(2, 2)
        assert load_latest(folder, model, generators=False).step == 1
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(folder, model, None, step=2)
        with pytest.raises(
            CheckpointError, match=r"cannot be created or listed.*: PermissionError: "
        ):
            save_checkpoint(folder / "new", model, None)
        return str(error.value)

    ranks(2, lambda rank: save_checkpoint(folder, torch.nn.Linear(2, 2), None, step=1))
    folder.chmod(0o555)
    with without_rights():
        errors = ranks(2, program)
    path = re.escape(f"{folder}")
    each = [rf"rank {r} \(host \S+\): \[Errno 13\] Permission denied: '{path}/\S+'" for r in (0, 1)]
    words = f"checkpoint 2 cannot be written to {path}: {'; '.join(each)}; checkpoint 1 is whole"
    assert all(re.fullmatch(words, text) for text in errors), errors
    assert [path.name for path in folder.iterdir()] == ["checkpoint-00000001-step-1"]


def test_file_in_place_of_the_folder_raises_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").touch()

    def program(rank):
        for call in (lambda: save_checkpoint(tmp_path / "file", None, None), load):
            with pytest.raises(
                CheckpointError, match=r"file cannot be created or listed.*FileExists"
            ):
                call()

    def load():
        load_latest(tmp_path / "file", None)

    ranks(2, program)


def test_save_checkpoint_is_exported_by_gtopk():
    assert gtopk.save_checkpoint is save_checkpoint
    assert "save_checkpoint" in gtopk.__all__
    with pytest.raises(AttributeError, match="no attribute 'save_checkpiont'"):
        gtopk.save_checkpiont  # noqa: B018
