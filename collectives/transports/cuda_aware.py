"""CUDA-aware: whether an MPI library takes arrays in a GPU's memory: by its claim, and by a trial.

A library may claim it and still crash, such as without a matching driver. So a child process tries
it before a rank relies on it: an MPI world of one process, which sends to itself.

The trial tests this host's library and GPU, not the network between hosts.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Final

import numpy as np

from .gpu import load_cupy

# Longer than a start of CUDA and MPI takes; an MPI that hangs must not keep the ranks.
_SECONDS: Final = 30.0
_SIZES: Final = (64, 1 << 20)  # bytes: sent at once, and after the receiver's word
_HELD: Final = "what arrived is what was sent"

# Variables by which a launcher makes a process its rank; others of OMPI_MCA_ are the user's.
_LAUNCHERS: Final = (
    *("OMPI_", "PMI", "PRTE_", "HYDRA", "HYDI_", "MPI_LOCAL", "SLURM_", "PALS_", "FLUX_"),
)
_OPEN_MPI_LAUNCHERS: Final = tuple(
    f"OMPI_MCA_{part}" for part in ("ess", "orte", "pmix", "prte", "schizo")
)


def why_staged() -> str:
    """Return why MPI cannot be given a GPU's memory here; "" where it can."""
    if not claims_cuda(import_module("mpi4py.MPI").__file__):
        return "the MPI library does not claim to be CUDA-aware"
    failure = attempt()
    return f"the MPI library claims to be CUDA-aware, but a try {failure}" if failure else ""


def claims_cuda(library: str | None) -> bool:
    """Ask an MPI library, or a library that has loaded it, whether it takes a GPU's arrays.

    MPIX_Query_cuda_support is Open MPI's, MPIX_GPU_query_support (kind 0: CUDA) MPICH's; a library
    that has neither takes none.
    """
    loaded = ctypes.CDLL(library)
    if hasattr(loaded, "MPIX_Query_cuda_support"):
        return bool(loaded.MPIX_Query_cuda_support())
    if hasattr(loaded, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = loaded.MPIX_GPU_query_support(ctypes.c_int(0), ctypes.byref(supported))
        return not failed and bool(supported.value)
    return False


def attempt(seconds: float = _SECONDS) -> str:
    """Let a child send GPU memory to itself over MPI; return how that failed, "" if it did not."""
    # The child finds modules where this process does, also those that a script put on its path.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {__name__} import {send_to_self.__name__}; {send_to_self.__name__}()"
    )
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=alone(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {seconds:g} s"
    if child.returncode < 0:
        return f"died: {signal.strsignal(-child.returncode)}"
    # Not the exit code alone: an MPI that ends a process may do so with 0.
    held = child.returncode == 0 and _HELD.encode() in child.stdout
    return "" if held else f"ended with exit code {child.returncode}"


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that make a process a launcher's rank."""

    def makes_a_rank(name: str) -> bool:
        if name.startswith("OMPI_MCA_"):
            return name.startswith(_OPEN_MPI_LAUNCHERS)
        return name.startswith(_LAUNCHERS)

    return {name: value for name, value in environ.items() if not makes_a_rank(name)}


def send_to_self() -> None:
    """Send GPU memory from this process to itself; this is what the child does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an expected outcome
    mpi, cupy = import_module("mpi4py.MPI"), load_cupy("mpi")
    for size in _SIZES:
        sent = (cupy.arange(size) % 251).astype(np.uint8)
        received = cupy.zeros_like(sent)
        cupy.cuda.get_current_stream().synchronize()
        request = mpi.COMM_SELF.Isend([sent, mpi.BYTE], 0)
        mpi.COMM_SELF.Recv([received, mpi.BYTE], 0)
        request.Wait()
        if not bool((sent == received).all()):
            sys.exit(1)
    print(_HELD)
