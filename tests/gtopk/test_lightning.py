"""gtopk.lightning: the callback and Fabric with the real Lightning, if installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: make test-adapters")


def test_lightning_trainer_exchanges_by_gtopk(torchrun: Any, tmp_path: Any) -> None:
    job = torchrun(2, "lightning_fit.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("Lightning uses gTop-k") == 2


def test_fabric_loop_exchanges_by_gtopk(torchrun: Any, tmp_path: Any) -> None:
    job = torchrun(2, "fabric_loop.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("Fabric uses gTop-k") == 2


def test_strategy_other_than_ddp_raises() -> None:
    from gtopk.lightning import GTopK

    unwrapped = SimpleNamespace(strategy=SimpleNamespace(model=torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="use strategy='ddp', got SimpleNamespace"):
        GTopK().on_fit_start(unwrapped, None)
