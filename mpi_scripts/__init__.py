"""Programs to launch: from the root, `mpirun -n 4 python mpi_scripts/train.py`."""
