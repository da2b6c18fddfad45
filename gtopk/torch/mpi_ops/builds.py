"""What can be used here, and what is in use: the questions that scripts ask a built Horovod."""

from __future__ import annotations

import torch

from collectives.transports.gpu import load_nccl, torch_nccl

from ...runtime.world.world import current


def mpi_enabled() -> bool:
    """Tell whether the ranks are joined by MPI now."""
    return current().transport.name == "mpi"


def gloo_enabled() -> bool:
    """Tell whether the ranks are joined by gloo now."""
    return current().transport.name == "torch.distributed"


def mpi_threads_supported() -> bool:
    """Tell whether several threads may call MPI at once; ValueError where MPI is not in use."""
    if not mpi_enabled():
        raise ValueError(
            f"MPI is not enabled: the ranks are joined by {current().transport.name}; "
            "GTOPK_TRANSPORT=mpi, or mpirun, joins them by MPI"
        )
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_built() -> bool:
    """Tell whether MPI can be used here."""
    try:
        import mpi4py.MPI  # noqa: F401 - loads the MPI library
    except (ImportError, RuntimeError):
        return False
    return True


def gloo_built() -> bool:
    """Tell whether gloo can be used here."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return the version of the NCCL that can be used here, such as 22703; 0 for none.

    CuPy's; else that of torch, which carries dense reductions.
    """
    try:
        return int(load_nccl().get_version())
    except ImportError:
        return torch_nccl()


def cuda_built() -> bool:
    """Tell whether this torch is one for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Tell whether this torch is one for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False
