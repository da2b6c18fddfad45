"""Transports: one interface for messages between ranks, with several implementations.

transport.py            the interface; carrier.py: the transport of all ranks, its views and their
                        mailbox; departure.py: a rank's last message
local.py                threads in one process
mpi.py                  mpi4py
torch_distributed.py    gloo; rendezvous.py: how its ranks meet
horovod.py              Horovod's alltoall
staged.py               GPU messages through the host; direct.py: with CUDA-aware MPI
nccl.py                 GPU messages over NCCL, with nccl_collectives.py (CuPy's) or, without
                        CuPy, torch_collectives.py
device_choice.py        chooses one of these for GPUs; gpu.py: this rank's GPU, and arrays on it
reductions.py           dense collectives made of send and receive; checksums
polling.py              waits for a peer, with a timeout; notices when it has left
pacing.py               emulation of a slow link
counters.py             bytes sent and time waited; numbers and memory that ranks share
node_memory.py          shared memory of the ranks on a host
"""

from __future__ import annotations

from ..telemetry import Traffic
from .carrier import Carrier
from .counters import Counter
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

    Call its `leave` before the process ends, so that waiting peers learn the reason and gloo's
    threads end.
    timeout_seconds: the longest a rank waits for a peer; start_timeout_seconds: for all to arrive
    (no limit for MPI and Horovod).
    bootstrap: a transport of the same ranks, required by "nccl" and "staged": it carries everything
    but GPU messages. Those travel over NCCL, or over bootstrap through pinned host memory.
    "mpi" carries GPU messages itself if every rank has CuPy and a GPU: from GPU to GPU if MPI is
    CUDA-aware and passes a trial, else through pinned memory.
    Raises ValueError for another name, ImportError if a package is missing, PeerTimeoutError if a
    rank is missing, RuntimeError if "nccl" does not have a GPU for each rank.
    """
    if name == "local":
        return local_world(1, timeout_seconds)[0]
    # Import only what is asked for: mpi4py, torch, Horovod and CuPy are optional.
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

        load_cupy(name)  # raise now if CuPy is missing, not at the first message
        return StagedTransport(bootstrap)
    from .nccl import NcclTransport

    return NcclTransport(bootstrap, timeout_seconds=timeout_seconds)
