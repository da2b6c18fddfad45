"""gtopk.ddp: the hook on real ranks of torchrun."""

from __future__ import annotations

import pytest

from tests.matrix import some_of


@pytest.mark.parametrize("ranks", some_of([2, 3], 3))
def test_ddp_exchanges_its_buckets_by_gtopk(torchrun, ranks):
    job = torchrun(ranks, "ddp_hook.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("the hook does as it says") == ranks


@pytest.mark.parametrize("ranks", some_of([2, 3], 3))
def test_what_the_hook_holds_back_is_saved_and_loaded(torchrun, ranks):
    job = torchrun(ranks, "ddp_saved.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("the hook saves as it says") == ranks


@pytest.mark.parametrize("ranks", some_of([2, 3], 3))
def test_the_hook_makes_the_steps_of_adamw(torchrun, ranks):
    job = torchrun(ranks, "ddp_adamw.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("the hook makes AdamW's steps") == ranks
