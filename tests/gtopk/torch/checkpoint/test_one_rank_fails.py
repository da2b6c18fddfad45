"""If one rank cannot save or load, all ranks learn of it, and none waits for it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import checkpoint as dcp

import gtopk.torch as hvd
from gtopk import CheckpointError, load_latest, save_checkpoint
from gtopk.torch.checkpoint import archive as archives
from gtopk.torch.checkpoint import state as states
from gtopk.torch.checkpoint.dcp import Writer


def test_save_raises_on_all_ranks_when_state_dict_fails_on_one(ranks, tmp_path):
    """As within a round of gradients that are applied later."""

    class Loader:
        def state_dict(self):
            if hvd.rank() == 1:
                raise RuntimeError("gradients are under way")
            return {}

    def program(rank):
        with pytest.raises(
            CheckpointError, match=r"rank 1 \(host .*\): RuntimeError: gradients are under way"
        ):
            save_checkpoint(tmp_path, torch.nn.Linear(1, 1), None, Loader(), 3)

    ranks(2, program)
    assert list(tmp_path.iterdir()) == []


class FailsOnRank1(torch.nn.Linear):
    """A model that fails in state_dict on one rank."""

    def state_dict(self, *args, **options):
        if hvd.rank() == 1:
            raise RuntimeError("not now")
        return super().state_dict(*args, **options)


def test_load_raises_on_all_ranks_when_state_dict_fails_on_one(ranks, tmp_path):
    def program(rank):
        save_checkpoint(tmp_path, torch.nn.Linear(1, 1), None, step=1)
        words = r"step-1 cannot be loaded: rank 1 \(host .*\): RuntimeError.*not now"
        kind, words = (RuntimeError, "^not now$") if rank == 1 else (CheckpointError, words)
        with pytest.raises(kind, match=words):
            load_latest(tmp_path, FailsOnRank1(1, 1), None, generators=False)
        return load_latest(tmp_path, torch.nn.Linear(1, 1), None, generators=False).step

    assert ranks(2, program) == [1, 1]


def test_save_raises_on_all_ranks_when_one_lacks_memory_and_works_later(
    ranks, tmp_path, monkeypatch
):
    taking, full = states.flatten, [True]

    def flatten(obj, *, copy=False):
        if full and "generators" in obj and hvd.rank() == 1:
            raise RuntimeError("can't allocate memory")
        return taking(obj, copy=copy)

    monkeypatch.setattr(states, "flatten", flatten)

    def program(rank):
        with pytest.raises(CheckpointError, match=r"at step 1: rank 1 \(host .*can't allocate"):
            save_checkpoint(tmp_path, torch.nn.Linear(1, 1), None, step=1)
        hvd.barrier()
        full.clear()
        hvd.barrier()
        save_checkpoint(tmp_path, torch.nn.Linear(1, 1), None, step=2)
        return load_latest(tmp_path, None, generators=False).step

    assert ranks(2, program) == [2, 2]


def test_all_ranks_load_the_older_one_when_one_lacks_memory(ranks, tmp_path, monkeypatch, capfd):
    putting = archives.unflatten

    def unflatten(tree, tensors):
        if hvd.rank() == 1 and "large" in str(tree):
            raise MemoryError
        return putting(tree, tensors)

    def program(rank):
        save_checkpoint(tmp_path, None, None, step=1)
        save_checkpoint(tmp_path, None, None, step=2, what="large" * rank)
        monkeypatch.setattr(archives, "unflatten", unflatten)
        return load_latest(tmp_path, None, generators=False).step

    assert ranks(2, program) == [1, 1]
    assert "rank-1-of-2.json'; looking for an older one" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_load_from_dcp_raises_on_all_ranks_when_keys_fail_on_one(ranks, tmp_path):
    dcp.save({"thing": {"a": 1}}, storage_writer=Writer(tmp_path, 5))

    class Thing:
        def state_dict(self):
            if hvd.rank() == 1:
                raise RuntimeError("not now")
            return {"a": 0}

        def load_state_dict(self, state):
            pass

    def load(rank):
        kind = RuntimeError if rank == 1 else CheckpointError
        with pytest.raises(kind, match=r"checkpoint-00000001-step-5.*not now"):
            load_latest(tmp_path, None, generators=False, thing=Thing())

    ranks(2, load)
