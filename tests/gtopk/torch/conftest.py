"""Worlds with ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives.transports import LocalTransport
from gtopk.runtime.world import world


@pytest.fixture
def ranks(threads) -> Callable[..., list[Any]]:
    """Return `ranks(size, program)`, which runs `program(rank)` in gtopk's world on each rank."""

    def run(size: int, program: Callable[[int], Any]) -> list[Any]:
        def rank(transport: LocalTransport) -> Any:
            with world.entered(transport):
                return program(transport.rank)

        return threads(size, rank)

    return run
