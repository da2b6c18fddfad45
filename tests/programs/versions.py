"""Run on two ranks or more; rank 1 has another gtopk version, so that no rank starts to train."""

from __future__ import annotations

import light_torch  # noqa: F401

from checks import raises

import gtopk
import gtopk.torch as hvd
from gtopk.runtime.launch import launched_by
from gtopk.runtime.world import membership

job = launched_by()
assert job is not None
if job.rank == 1:
    membership.__version__ = "9.9.9"  # type: ignore[attr-defined]
others = ", ".join(str(rank) for rank in range(job.size) if rank != 1)
whose = "ranks" if job.size > 2 else "rank"
raises(
    hvd.HorovodInternalError,
    hvd.init,
    f"{whose} {others}: gtopk {gtopk.__version__}; rank 1: gtopk 9.9.9",
)
assert not hvd.is_initialized()
print("the other version was reported\n", end="", flush=True)
