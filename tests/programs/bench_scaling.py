"""Run under mpirun: `python -m mpi_scripts.scaling`, on real ranks."""

import sys

from mpi_scripts.scaling.__main__ import main

sys.exit(main())
