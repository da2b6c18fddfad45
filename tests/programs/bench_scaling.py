"""Run under mpirun: `python -m mpi_scripts.scaling`, on ranks that are real."""

import sys

from mpi_scripts.scaling.__main__ import main

sys.exit(main())
