"""Launchers: whose mpirun the tests start, and what it does otherwise than Open MPI's."""

from __future__ import annotations

from typing import Final

from gtopk.runtime.launch import find_mpirun, identify

_mpirun = find_mpirun()
VENDOR: Final = identify(_mpirun).vendor if _mpirun else ""
# MPICH's kills the other ranks where one ends before MPI does, and has their code for its own.
CODE_WHERE_A_RANK_EXITS: Final = 9 if VENDOR == "MPICH" else 1
