"""Mistakes in a step: one clear error on every rank, and no rank hangs."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("ranks", [3])
def test_every_rank_is_told_what_is_wrong_and_where(mpirun, ranks: int) -> None:
    done = mpirun(ranks, "mismatch.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every mistake was told") == ranks, done.stdout + done.stderr
