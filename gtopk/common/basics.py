"""Horovod's import path for `HorovodBasics`, which some clients query for ranks and builds."""

from __future__ import annotations

from ..reduce_ops import Adasum, Average, Max, Min, Product, Sum
from ..runtime.world.process_sets import ProcessSet, global_process_set
from ..torch import mpi_ops

__all__ = ["HorovodBasics", "ProcessSet", "global_process_set"]


class HorovodBasics:
    """The functions of `horovod.torch` other than operations on tensors, as methods.

    The arguments name the location of Horovod's library, which gtopk does not need: they are
    ignored.
    """

    Average, Sum, Adasum, Min, Max, Product = Average, Sum, Adasum, Min, Max, Product

    init = staticmethod(mpi_ops.init)
    shutdown = staticmethod(mpi_ops.shutdown)
    is_initialized = staticmethod(mpi_ops.is_initialized)
    start_timeline = staticmethod(mpi_ops.start_timeline)
    stop_timeline = staticmethod(mpi_ops.stop_timeline)
    size = staticmethod(mpi_ops.size)
    rank = staticmethod(mpi_ops.rank)
    local_size = staticmethod(mpi_ops.local_size)
    local_rank = staticmethod(mpi_ops.local_rank)
    cross_size = staticmethod(mpi_ops.cross_size)
    cross_rank = staticmethod(mpi_ops.cross_rank)
    is_homogeneous = staticmethod(mpi_ops.is_homogeneous)
    mpi_threads_supported = staticmethod(mpi_ops.mpi_threads_supported)
    mpi_enabled = staticmethod(mpi_ops.mpi_enabled)
    mpi_built = staticmethod(mpi_ops.mpi_built)
    gloo_enabled = staticmethod(mpi_ops.gloo_enabled)
    gloo_built = staticmethod(mpi_ops.gloo_built)
    nccl_built = staticmethod(mpi_ops.nccl_built)
    ddl_built = staticmethod(mpi_ops.ddl_built)
    ccl_built = staticmethod(mpi_ops.ccl_built)
    cuda_built = staticmethod(mpi_ops.cuda_built)
    rocm_built = staticmethod(mpi_ops.rocm_built)

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass
