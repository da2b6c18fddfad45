"""Messages between GPUs of MPI's ranks: over MPI, staged, and over NCCL with a GPU per rank."""

from __future__ import annotations

import sys

from collectives_job import job
from collectives_transports import LAWS
from of_gpus import OfGpus, device, refusal_by_nccl, without_counts

from collectives import open_transport


def main(name: str) -> None:
    """Run the laws of every transport on the one of that name."""
    mpi = open_transport("mpi", timeout_seconds=60)
    laws = without_counts(LAWS)
    with job(mpi), device(mpi.rank):
        transport = mpi
        if name != "mpi":
            transport = open_transport(name, bootstrap=mpi, timeout_seconds=60)
        for law in laws:
            law(OfGpus(transport))
        if name == "staged" and mpi.size > 1:
            refusal_by_nccl(mpi)
    print(f"rank {mpi.rank} of {mpi.size}: {len(laws)} laws hold\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
