"""Shards for a model that is too small for more than one block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collectives.algorithms import shards
from gtopk.compression import Compression


class _InShards:
    """Create shards that send about this fraction of all entries per step.

    An object, because a function's repr in a test's name has an address that differs by worker.
    """

    def __call__(self, density: float, **options: Any) -> Any:
        return Compression.shards(max(1, min(6, round(1 / density))), 3, **options)

    def __repr__(self) -> str:
        return "in_shards"


in_shards = _InShards()


@pytest.fixture(scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK", 8)
        yield
