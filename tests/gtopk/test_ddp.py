"""gtopk.ddp: the hook on real ranks."""

from __future__ import annotations

import pytest

from tests.matrix import some_of


@pytest.fixture(scope="module", params=some_of([2, 3], 3))
def checked(request, forked, torchrun):
    """Return the number of ranks, and what one job of theirs says of all checks.

    Once by torchrun, whose ranks have a hash secret each: names in a set come in unlike orders.
    """
    start = torchrun if request.param == 2 else forked
    return request.param, start(request.param, "ddp_checks.py")


def test_ddp_exchanges_its_buckets_by_gtopk(checked):
    ranks, job = checked
    assert job.stdout.count("the hook does as it says") == ranks, job.stdout + job.stderr


def test_what_the_hook_holds_back_is_saved_and_loaded(checked):
    ranks, job = checked
    assert job.stdout.count("the hook saves as it says") == ranks, job.stdout + job.stderr


def test_the_hook_exchanges_shards(checked):
    ranks, job = checked
    assert job.stdout.count("the hook exchanges shards") == ranks, job.stdout + job.stderr
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("ranks", some_of([2, 3], 2))
def test_the_hook_makes_the_steps_of_adamw(forked, ranks):
    job = forked(ranks, "ddp_adamw.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("the hook makes AdamW's steps") == ranks
