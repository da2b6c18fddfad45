"""gtopk.ddp: the hook on real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gtopk.compression import GTopK
from gtopk.ddp import take_over_clipping
from tests.matrix import some_of


@pytest.fixture(scope="module", params=some_of([2, 3], 3))
def finished_job(request, forked, torchrun):
    """Return the number of ranks, and one job's output for all checks.

    Once with torchrun, where ranks have different hash secrets, and so different orders of sets.
    """
    start = torchrun if request.param == 2 else forked
    return request.param, start(request.param, "ddp_checks.py", timeout=300)


def test_ddp_hook_exchanges_buckets_by_gtopk(finished_job):
    ranks, job = finished_job
    assert job.stdout.count("the hook does as it says") == ranks, job.stdout + job.stderr


def test_ddp_hook_residuals_are_saved_and_loaded(finished_job):
    ranks, job = finished_job
    assert job.stdout.count("the hook saves as it says") == ranks, job.stdout + job.stderr


def test_ddp_hook_exchanges_shards(finished_job):
    ranks, job = finished_job
    assert job.stdout.count("the hook exchanges shards") == ranks, job.stdout + job.stderr
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("ranks", some_of([2, 3], 2))
def test_ddp_hook_makes_adamw_steps(forked, ranks):
    job = forked(ranks, "ddp_adamw.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("the hook makes AdamW's steps") == ranks


@pytest.mark.parametrize(
    ("correction", "advice"),
    [
        ({"momentum_correction": 0.9}, "leave the correction out and let SGD take the momentum"),
        ({"adam_correction": (0.9, 0.999)}, "leave the correction out and use AdamW"),
    ],
)
def test_clipping_with_a_correction_raises_and_names_the_alternative(correction, advice):
    state = SimpleNamespace(compression=GTopK(0.01, **correction), makes_adam_steps=False)
    with pytest.raises(ValueError, match=rf"clip=0\.5 is a norm.*: give clip=0, or {advice}"):
        take_over_clipping(state, 0.5, "clip", "give clip=0")
