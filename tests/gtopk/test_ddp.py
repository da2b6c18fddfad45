"""gtopk.ddp: the hook on real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gtopk.compression import GTopK
from gtopk.ddp import take_over_clipping
from tests.matrix import some_of


@pytest.fixture(scope="module", params=some_of([2, 3], 3))
def checked(request, forked, torchrun):
    """Return the number of ranks, and one job's output for all checks.

    Once with torchrun, where ranks have different hash secrets, and so different orders of sets.
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


@pytest.mark.parametrize(
    ("correction", "way_out"),
    [
        ({"momentum_correction": 0.9}, "leave the correction out and let SGD take the momentum"),
        ({"adam_correction": (0.9, 0.999)}, "leave the correction out and use AdamW"),
    ],
)
def test_a_correction_that_cannot_be_clipped_names_the_optimizer_that_can(correction, way_out):
    state = SimpleNamespace(compression=GTopK(0.01, **correction), makes_adam_steps=False)
    with pytest.raises(ValueError, match=rf"clip=0\.5 is a norm.*: give clip=0, or {way_out}"):
        take_over_clipping(state, 0.5, "clip", "give clip=0")
