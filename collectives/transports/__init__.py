"""Transports: one interface for messages between ranks, with several implementations.

transport.py            the interface; carrier.py: a transport of all ranks, its views, and where
                        they wait for messages; departure.py: the last message of a rank
local.py                threads of one process
mpi.py                  mpi4py
torch_distributed.py    gloo; rendezvous.py: how its ranks meet
horovod.py              Horovod's alltoall
staged.py               messages of GPUs through the host; direct.py: by CUDA-aware MPI
nccl.py                 messages of GPUs by NCCL, with nccl_collectives.py (CuPy's) or, without
                        CuPy, torch_collectives.py
device_choice.py        which of these carries them; gpu.py: this rank's GPU, and arrays on it
reductions.py           dense collectives, made of send and receive; checksums
polling.py              waits, with a timeout, for what a peer does that may have left
pacing.py               a slow link, emulated
counters.py             bytes sent and time waited; numbers and memory that ranks share
node_memory.py          memory that the ranks of a host share
"""

from __future__ import annotations

from .carrier import Carrier
from .counters import Counter, Traffic
from .local import LocalTransport, local_world, run_ranks
from .transport import Transport

TRANSPORTS = ("local", "mpi", "torch.distributed", "horovod", "nccl", "staged")

__all__ = [
    "Carrier",
    "Counter",
    "LocalTransport",
    "Traffic",
    "Transport",
    "local_world",
    "open_transport",
    "run_ranks",
]


def open_transport(
    name: str,
    timeout_seconds: float = 600.0,
    start_timeout_seconds: float = 120.0,
    *,
    bootstrap: Transport | None = None,
) -> Transport:
    """Return this process's transport, one of TRANSPORTS; "local" is a world of one.

    Call its `leave` before the process ends: a peer that waits learns why, and gloo's threads end.
    timeout_seconds: the longest a rank waits for a peer; start_timeout_seconds: for all to arrive
    (the starts of MPI and Horovod know no limit).
    bootstrap: a transport of the same ranks, which "nccl" and "staged" need: it carries all but
    the messages of GPUs. Those travel over NCCL, or through it and pinned host memory.
    "mpi" carries them itself where every rank has CuPy and a GPU: from GPU to GPU where MPI is
    CUDA-aware, and tried, else through pinned memory.
    Raises ValueError for another name, ImportError when a package is missing, PeerTimeoutError when
    a rank is, RuntimeError when "nccl" has no GPU for each rank.
    """
    if name == "local":
        return local_world(1, timeout_seconds)[0]
    # Each is imported only where it is asked for: mpi4py, torch, Horovod and CuPy are optional.
    if name == "mpi":
        from .direct import open_mpi

        return open_mpi(timeout_seconds=timeout_seconds)
    if name == "torch.distributed":
        from .torch_distributed import open_torch_distributed

        return open_torch_distributed(timeout_seconds, start_timeout_seconds)
    if name == "horovod":
        from .horovod import open_horovod

        return open_horovod(timeout_seconds)
    if name not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {name!r}")
    if bootstrap is None:
        raise ValueError(f"open_transport({name!r}) needs bootstrap=, such as an MPI transport")
    if name == "staged":
        from .gpu import load_cupy
        from .staged import StagedTransport

        load_cupy(name)  # where it is missing that is an error now, not at the first message
        return StagedTransport(bootstrap)
    from .nccl import NcclTransport

    return NcclTransport(bootstrap, timeout_seconds=timeout_seconds)
