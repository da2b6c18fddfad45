"""The laws of every transport, on ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collectives import Transport
from collectives.transports import horovod, torch_distributed
from tests.matrix import some_of
from tests.programs.collectives_transports import COUNTING, LARGE, LAWS


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("test_"))
@pytest.mark.parametrize(
    ("kind", "size"),
    some_of(
        [
            *(("local", size) for size in (1, 2, 3, 4, 5, 8)),
            *(("torch.distributed", size) for size in (1, 2, 3, 5)),
            *(("horovod", size) for size in (1, 2, 3)),
        ],
        *(("local", size) for size in (1, 2, 5)),
        *(("torch.distributed", size) for size in (1, 2, 3)),
        *(("horovod", size) for size in (2, 3)),
    ),
)
def test_transport_laws_hold_in_threads(
    in_world, kind: str, law: Callable[[Transport], None], size: int, monkeypatch
) -> None:
    # Limits so low that every path is taken.
    if size % 2 and law not in COUNTING:
        monkeypatch.setattr(torch_distributed, "NATIVE_BYTES", 64)
    pieces = {2: 1 << 12 if law in LARGE else 16}
    monkeypatch.setattr(torch_distributed, "PIECE_BYTES", pieces.get(size, 1 << 18))
    monkeypatch.setattr(
        horovod, "TICK_BYTES", 3 * 50 if size == 3 and law not in LARGE + COUNTING else 1 << 30
    )
    in_world(kind, size, law)
