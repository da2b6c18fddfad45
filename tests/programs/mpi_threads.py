"""The laws of channels on an MPI that was started with a thread level, the argument."""

import sys

import mpi4py
from collectives_job import job
from collectives_transports import (
    test_channels_may_be_used_by_concurrent_threads,
    test_channels_receive_their_messages_in_any_order,
)

from collectives import open_transport


def main(level: str) -> None:
    """Run the laws that use several channels, in separate threads or not."""
    mpi4py.rc.thread_level = level
    transport = open_transport("mpi", timeout_seconds=60)
    from mpi4py import MPI

    with job(transport):
        test_channels_may_be_used_by_concurrent_threads(transport)
        test_channels_receive_their_messages_in_any_order(transport)
        turns = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        line = f"rank {transport.rank} of {transport.size}: in turns: {turns}"
        print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
