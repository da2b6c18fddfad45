"""With density 1, every training loop gives the same result as PyTorch's DDP."""

from __future__ import annotations

import pytest

from tests.matrix import some_of


@pytest.mark.parametrize(("ranks", "ways"), some_of([(2, 27), (3, 12)], (2, 27)))
def test_density_1_equals_distributed_data_parallel(forked, ranks, ways):
    job = forked(ranks, "equals_ddp.py")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count(f"{ways} ways to train are DDP's") == ranks, job.stdout + job.stderr
