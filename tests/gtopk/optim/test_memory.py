"""The memory of a step; no step allocates temporary arrays of the parameters' size."""

from __future__ import annotations

import json
import sys

import pytest

from gtopk.cli.plan import MEMORY
from tests.matrix import some_of


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("way", some_of(MEMORY, "sparse", "adam, shards"))
def test_steps_use_the_memory_that_plan_predicts(forked, way: str) -> None:
    job = forked(2, "memory_of_a_step.py", way)
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout.splitlines()[-1])
    # The libraries' own memory varies between machines.
    assert found["most"] == pytest.approx(MEMORY[way], rel=0.05, abs=1.0)
    if way != "adam, shards":  # its shard, half of all, is processed separately
        assert found["most"] < found["kept"] + 1.0
