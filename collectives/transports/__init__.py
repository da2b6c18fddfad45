"""How messages travel: one protocol, several carriers."""

from __future__ import annotations

from .carrier import Carrier
from .local import LocalTransport, local_world, run_ranks
from .traffic import Traffic
from .transport import Transport

__all__ = [
    "Carrier",
    "LocalTransport",
    "Traffic",
    "Transport",
    "local_world",
    "open_transport",
    "run_ranks",
]


def open_transport(name: str, timeout_seconds: float = 600.0) -> Transport:
    """Return this process's transport: "mpi", or "local" (a world of this process alone).

    Raises ValueError for another name, ImportError when "mpi" lacks mpi4py or an MPI library.
    """
    if name == "mpi":
        from .mpi import MpiTransport

        return MpiTransport(timeout_seconds=timeout_seconds)
    if name == "local":
        return local_world(1, timeout_seconds)[0]
    raise ValueError(f"transport must be 'mpi' or 'local', got {name!r}")
