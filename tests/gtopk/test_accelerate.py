"""gtopk.accelerate: a loop with the real Accelerate, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-adapters")


def test_a_prepared_model_goes_by_gtopk(torchrun: Any, tmp_path: Any) -> None:
    job = torchrun(2, "accelerate_loop.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("Accelerate goes by gTop-k") == 2
