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


def open_transport(
    name: str, timeout_seconds: float = 600.0, *, bootstrap: Transport | None = None
) -> Transport:
    """Return this process's transport.

    "mpi"; "local": a world of this process alone; "nccl": messages of GPUs over NCCL, "staged":
    through pinned host memory, and all others over `bootstrap`, a transport of the same ranks.

    Raises ValueError for another name, ImportError when a package is missing, RuntimeError when
    "nccl" finds no GPU for each rank.
    """
    if name == "mpi":
        from .mpi import MpiTransport

        return MpiTransport(timeout_seconds=timeout_seconds)
    if name == "local":
        return local_world(1, timeout_seconds)[0]
    if name in ("nccl", "staged"):
        if bootstrap is None:
            raise ValueError(f"open_transport({name!r}) needs bootstrap=, such as an MPI transport")
        if name == "staged":
            from .staged import StagedTransport

            return StagedTransport(bootstrap)
        from .nccl import NcclTransport

        return NcclTransport(bootstrap, timeout_seconds=timeout_seconds)
    raise ValueError(f"transport must be 'mpi', 'local', 'nccl' or 'staged', got {name!r}")
