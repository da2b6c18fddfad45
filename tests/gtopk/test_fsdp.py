"""gtopk.fsdp: two replicas of two shards, on real ranks of torchrun; and what it needs."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch
from torch.distributed import fsdp


def test_replicas_of_shards_exchange_by_gtopk(torchrun):
    job = torchrun(4, "fsdp_hook.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("shards are replicated") == 4


def test_backward_goes_on_while_shards_are_exchanged(torchrun):
    job = torchrun(4, "fsdp_overlap.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("backward goes on") == 4


def test_a_unit_may_be_used_in_part(torchrun):
    job = torchrun(4, "fsdp_used_in_part.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("nothing is lost") == 4


def test_what_replicas_hold_back_goes_on_in_fewer_of_them(torchrun, tmp_path):
    for ranks in (4, 2):
        job = torchrun(ranks, "fsdp_resume.py", str(tmp_path))
        assert job.returncode == 0, job.stdout + job.stderr
        assert job.stdout.count("the residual is what it was") == ranks


@pytest.mark.parametrize(
    ("of", "name"), [(fsdp, "FSDPModule"), (fsdp.FSDPModule, "set_all_reduce_hook")]
)
def test_an_older_torch_is_told_which_version_it_takes(monkeypatch, of, name):
    monkeypatch.delattr(of, name)
    monkeypatch.delitem(sys.modules, "gtopk.fsdp", raising=False)
    needed = f"gtopk.fsdp needs torch 2.7 or newer, got {torch.__version__}"
    with pytest.raises(ImportError, match=f"^{re.escape(needed)}$"):
        importlib.import_module("gtopk.fsdp")
