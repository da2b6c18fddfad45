"""Run on two ranks or more, of which the second has another gtopk: none begins to train."""

from __future__ import annotations

import os

import light_torch  # noqa: F401
from checks import raises

import gtopk
import gtopk.torch as hvd
from gtopk.world import world

size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["WORLD_SIZE"])
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("RANK")):
    world.__version__ = "9.9.9"  # type: ignore[attr-defined]
others = ", ".join(str(rank) for rank in range(size) if rank != 1)
raises(
    hvd.HorovodInternalError,
    hvd.init,
    f"{'ranks' if size > 2 else 'rank'} {others}: gtopk {gtopk.__version__}; rank 1: gtopk 9.9.9",
)
assert not hvd.is_initialized()
print("the other version was told\n", end="", flush=True)
