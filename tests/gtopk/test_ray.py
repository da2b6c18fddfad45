"""Ray Train: the models it prepares use the hook of `gtopk.ddp`, if it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray is not installed: make test-adapters")
ROOT = Path(__file__).parents[2]


def test_ray_train_model_exchanges_by_gtopk_without_an_adapter(tmp_path: Path) -> None:
    job = subprocess.run(
        [sys.executable, str(ROOT / "tests/programs/ray_train.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Ray Train uses gTop-k" in job.stdout
