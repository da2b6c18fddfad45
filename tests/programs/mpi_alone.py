"""Print how many ranks a rank's child sees in the environment of `without_launcher`."""

import os
import subprocess
import sys

from mpi4py import MPI

from collectives.transports.direct import without_launcher

COUNT = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"

child = subprocess.run(
    [sys.executable, "-c", COUNT],
    env=without_launcher(os.environ),
    capture_output=True,
    text=True,
    check=True,
)
world = MPI.COMM_WORLD
line = f"rank {world.rank} of {world.size} has a child of {child.stdout.strip()}"
print(f"{line}\n", end="", flush=True)
