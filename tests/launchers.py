"""Launchers: which MPI's mpirun the tests start, and how it differs from Open MPI's."""

from __future__ import annotations

from typing import Final

from gtopk.runtime.launch import find_mpirun, identify

_mpirun = find_mpirun()
VENDOR: Final = identify(_mpirun).vendor if _mpirun else ""
# If a rank ends before MPI does, MPICH's mpirun kills the others and returns their exit code.
CODE_WHERE_A_RANK_EXITS: Final = 9 if VENDOR == "MPICH" else 1
