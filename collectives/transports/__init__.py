"""How messages travel: one protocol, several carriers."""

from __future__ import annotations

from .carrier import Carrier
from .local import LocalTransport, local_world, run_ranks
from .traffic import Traffic
from .transport import Transport

TRANSPORTS = "'local', 'mpi' or 'torch.distributed'"

__all__ = [
    "Carrier",
    "LocalTransport",
    "Traffic",
    "Transport",
    "local_world",
    "open_transport",
    "run_ranks",
]


def open_transport(
    name: str, timeout_seconds: float = 600.0, start_timeout_seconds: float = 120.0
) -> Transport:
    """Return this process's transport: "mpi", "torch.distributed", or "local" (a world of one).

    timeout_seconds: the longest a rank waits for a peer; start_timeout_seconds: for all to arrive
    (MPI's own start has no such limit). Raises ValueError for another name, ImportError when a
    package is missing, PeerTimeoutError when a rank is.
    """
    if name == "local":
        return local_world(1, timeout_seconds)[0]
    if name == "mpi":
        from .mpi import MpiTransport

        return MpiTransport(timeout_seconds=timeout_seconds)
    if name == "torch.distributed":
        from .torch_distributed import open_torch_distributed

        return open_torch_distributed(timeout_seconds, start_timeout_seconds)
    raise ValueError(f"transport must be {TRANSPORTS}, got {name!r}")
