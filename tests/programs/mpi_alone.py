"""A rank's child in the environment of `alone`: how many ranks it sees."""

import os
import subprocess
import sys

from mpi4py import MPI

from collectives.transports.direct import alone

COUNT = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"

child = subprocess.run(
    [sys.executable, "-c", COUNT], env=alone(os.environ), capture_output=True, text=True, check=True
)
world = MPI.COMM_WORLD
said = f"rank {world.rank} of {world.size} has a child of {child.stdout.strip()}"
print(f"{said}\n", end="", flush=True)
