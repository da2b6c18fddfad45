"""Balanced batches on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_real_ranks_with_workers_see_every_sample_once(mpirun: Callable[..., Any]) -> None:
    job = mpirun(3, "adapts.py")
    assert job.returncode == 0, job.stderr
