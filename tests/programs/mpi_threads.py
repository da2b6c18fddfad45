"""The laws of streams on an MPI that was started with a thread level, the argument."""

import sys

import mpi4py
from collectives_job import job
from collectives_transports import LAWS

from collectives import open_transport


def main(level: str) -> None:
    """Run the laws that use several streams, in separate threads or not."""
    mpi4py.rc.thread_level = level
    transport = open_transport("mpi", timeout_seconds=60)
    from mpi4py import MPI

    laws = [law for law in LAWS if "channel" in law.__name__ or "stream" in law.__name__]
    with job(transport):
        assert laws
        for law in laws:
            law(transport)
        turns = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        line = f"rank {transport.rank} of {transport.size}: in turns: {turns}"
        print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
