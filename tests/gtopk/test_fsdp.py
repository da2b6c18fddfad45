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
def checked(request, tmp_path_factory):
    """Return the output of one job of 4 ranks for all checks, and the folder with its checkpoints.

    torchrun's ranks have different hash secrets.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    start = request.getfixturevalue(request.param)
    return start(4, "fsdp_checks.py", str(folder), timeout=300), folder


def test_replicas_of_shards_exchange_by_gtopk(checked):
    job, _ = checked
    assert job.stdout.count("shards are replicated") == 4, job.stdout + job.stderr


def test_backward_goes_on_while_shards_are_exchanged(checked):
    job, _ = checked
    assert job.stdout.count("backward goes on") == 4, job.stdout + job.stderr


def test_replicas_make_the_steps_of_adamw(checked):
    job, _ = checked
    assert job.stdout.count("replicas make AdamW's steps") == 4, job.stdout + job.stderr


def test_a_unit_may_be_used_in_part(checked):
    job, _ = checked
    assert job.stdout.count("nothing is lost") == 4, job.stdout + job.stderr


def test_what_replicas_hold_back_goes_on_in_fewer_of_them(forked, checked):
    saved, folder = checked
    job = forked(2, "fsdp_resume.py", str(folder))
    for each in (saved, job):
        assert each.returncode == 0, each.stdout + each.stderr
    assert job.stdout.count("the residual is what it was") == 2


@pytest.mark.parametrize(
    ("of", "name"), [(fsdp, "FSDPModule"), (fsdp.FSDPModule, "set_all_reduce_hook")]
)
def test_an_older_torch_is_told_which_version_it_takes(monkeypatch, of, name):
    monkeypatch.delattr(of, name)
    monkeypatch.delitem(sys.modules, "gtopk.fsdp", raising=False)
    needed = f"gtopk.fsdp needs torch 2.7 or newer, got {torch.__version__}"
    with pytest.raises(ImportError, match=f"^{re.escape(needed)}$"):
        importlib.import_module("gtopk.fsdp")
