"""The engine on ranks as processes, over MPI and over gloo."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.matrix import some_of


@pytest.mark.parametrize(
    ("launcher", "ranks"), some_of([("mpirun", 3), ("forked", 2)], ("mpirun", 3))
)
def test_operations_are_matched_by_name_on_real_ranks(
    request: pytest.FixtureRequest, launcher: str, ranks: int
) -> None:
    launch: Any = request.getfixturevalue(launcher)
    job = launch(ranks, "any_order.py", HOROVOD_STALL_CHECK_TIME_SECONDS="0.4")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("any order will do") == ranks, job.stdout + job.stderr
    assert re.search(r"gtopk: rank 0 has waited 0\.\d+ s for rank 1 in allreduce.st", job.stderr)
