"""Contenders on a thinner model are configured as on the full model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpi_scripts.scaling import contenders
from mpi_scripts.scaling.models import emulated


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[object]:
    meet = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("scale", "cap"), [(1.0, 25.0), (10.0, 2.5), (40.0, 0.625)])
def test_ddp_bucket_size_shrinks_with_the_model(
    monkeypatch: pytest.MonkeyPatch, gloo: object, scale: float, cap: float
) -> None:
    made = []
    original = torch.nn.parallel.DistributedDataParallel

    def make(*arguments: object, **options: object) -> torch.nn.Module:
        made.append(original(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", make)
    compute = emulated("resnet20", scale, 0)
    contenders.ddp(contenders.Setting(compute, 0.001, 1, None, gloo))  # type: ignore[arg-type]
    assert [model.bucket_bytes_cap for model in made] == [int(cap * 2**20)]
