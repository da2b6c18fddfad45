"""gtopk.fsdp: two replicas of two shards on real ranks, and its requirements."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch
from torch.distributed import fsdp

from tests.matrix import some_of


@pytest.fixture(scope="module", params=some_of(["forked", "torchrun"], "forked"))
def finished_job(request, tmp_path_factory):
    """Return the output of one job of 4 ranks for all checks, and the folder with its checkpoints.

    torchrun's ranks have different hash secrets.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    start = request.getfixturevalue(request.param)
    return start(4, "fsdp_checks.py", str(folder), timeout=300), folder


def test_fsdp_replicas_of_shards_exchange_by_gtopk(finished_job):
    job, _ = finished_job
    assert job.stdout.count("shards are replicated") == 4, job.stdout + job.stderr


def test_fsdp_shards_are_exchanged_during_backward(finished_job):
    job, _ = finished_job
    assert job.stdout.count("backward goes on") == 4, job.stdout + job.stderr


def test_fsdp_replicas_make_adamw_steps(finished_job):
    job, _ = finished_job
    assert job.stdout.count("replicas make AdamW's steps") == 4, job.stdout + job.stderr


def test_fsdp_unit_used_in_part_conserves_gradients(finished_job):
    job, _ = finished_job
    assert job.stdout.count("nothing is lost") == 4, job.stdout + job.stderr


def test_fsdp_residuals_keep_their_sum_on_fewer_replicas(forked, finished_job):
    saved, folder = finished_job
    job = forked(2, "fsdp_resume.py", str(folder))
    for each in (saved, job):
        assert each.returncode == 0, each.stdout + each.stderr
    assert job.stdout.count("the residual is what it was") == 2


@pytest.mark.parametrize(
    ("owner", "name"), [(fsdp, "FSDPModule"), (fsdp.FSDPModule, "set_all_reduce_hook")]
)
def test_older_torch_raises_with_the_required_version(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    monkeypatch.delitem(sys.modules, "gtopk.fsdp", raising=False)
    message = f"gtopk.fsdp needs torch 2.7 or newer, got {torch.__version__}"
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        importlib.import_module("gtopk.fsdp")
