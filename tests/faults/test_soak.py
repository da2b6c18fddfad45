"""Many steps leave no trace but what they learned: neither memory nor descriptors grow."""

from __future__ import annotations

import json

import pytest

ROW, LAYERS = 12, 6


def soak(mpirun, ranks: int, steps: int, timeout: float) -> list[dict]:
    job = mpirun(ranks, "soak.py", str(steps), timeout=timeout)
    assert job.returncode == 0, job.stderr
    said = [line for line in job.stderr.splitlines() if "gtopk" in line]
    assert all("leaves 94 of 936 entries a step" in line for line in said), job.stderr
    said = [line.removeprefix("soak ") for line in job.stdout.splitlines()]
    found = sorted(map(json.loads, said), key=lambda each: each["rank"])
    assert [each["rank"] for each in found] == list(range(ranks))
    for each in found:
        assert each["digest"] == found[0]["digest"]
        # Every step's sum of step + rank over the ranks, to the last integer.
        assert each["counted"] == ranks * steps * (steps - 1) // 2 + steps * sum(range(ranks))
        assert each["skipped"] == 0
        assert each["buckets"][-1] > LAYERS / 2
        assert each["descriptors"][-1] == each["descriptors"][0]
    assert len({each["selected"] for each in found}) == 1
    return found


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_twenty_thousand_steps_leave_memory_as_it_was(mpirun):
    for each in soak(mpirun, ranks=4, steps=20_000, timeout=7000):
        # The first tenth warms up: plans, caches, the allocator's arenas.
        warm, *later = each["resident"]
        growth = max(later) / warm - 1
        print(f"rank {each['rank']}: {warm / 1e6:.1f} MB, grew {100 * growth:.2f} %", flush=True)
        assert growth < 0.01, each["resident"]


def test_a_few_hundred_steps_count_right_and_open_nothing(mpirun):
    soak(mpirun, ranks=2, steps=100, timeout=120)
