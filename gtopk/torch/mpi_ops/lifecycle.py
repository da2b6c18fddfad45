"""Lifecycle: init with process sets, queries, barrier and join, and the timeline.

Queries return the usable libraries, this process's rank, and the numbers of ranks and hosts. The
timeline records the ranks' operations while they run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from collectives.transports.gpu import load_nccl, torch_nccl

from ... import settings
from ...optim.peers import abort_steps
from ...runtime.world import process_sets as sets
from ...runtime.world import world
from ...runtime.world.process_sets import ProcessSet, global_process_set
from ...runtime.world.world import current, queried
from ...telemetry import timeline
from .tensors import clear_handles

if TYPE_CHECKING:
    from mpi4py import MPI


def is_initialized() -> bool:
    """Tell whether `init` has been called, and `shutdown` has not; also in a forked process."""
    return world.find() is not None


def mpi_enabled() -> bool:
    """Tell whether the ranks are connected by MPI now."""
    return is_initialized() and queried().transport.name == "mpi"


def gloo_enabled() -> bool:
    """Tell whether the ranks are connected by gloo now."""
    return is_initialized() and queried().transport.name == "torch.distributed"


def mpi_threads_supported() -> bool:
    """Tell whether several threads may call MPI at once; raise ValueError if MPI is not in use."""
    if not mpi_enabled():
        raise ValueError(
            f"MPI is not enabled: the ranks are connected by {current().transport.name}; use "
            "mpirun or GTOPK_TRANSPORT=mpi"
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
    """Return the version of the usable NCCL, such as 22703; 0 for none.

    This is CuPy's NCCL, or torch's if CuPy is not installed; torch's only supports dense
    reductions.
    """
    try:
        return int(load_nccl().get_version())
    except ImportError:
        return torch_nccl()


def cuda_built() -> bool:
    """Tell whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Tell whether torch is built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record, on rank 0, into a file in Chrome's trace format.

    mark_cycles: whether to mark the times when the ranks agreed on the next operations.
    Raises ValueError if HOROVOD_TIMELINE is neither DYNAMIC nor a file.
    """
    here = current()
    # Horovod's scripts expect this error.
    if not settings.HOROVOD_TIMELINE.read():
        raise ValueError(
            "start_timeline needs HOROVOD_TIMELINE in the environment: DYNAMIC, or a file"
        )
    timeline.start(here, file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop recording."""
    here = current()
    timeline.stop(here)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called this; operations in flight may go on."""
    # Numbered, because one rank may reach the next barrier while another is in this one.
    name = f"barrier.noname.{next(sets.require_process_set(process_set).members.unnamed)}"
    # Agreeing on the operation is the barrier.
    process_set.engine.submit(name, [], lambda transport, all_flags: None).wait()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data; wait for all, return the rank that joined last.

    Until all ranks have joined, this one contributes zeros to the others' allreduces. Averages are
    still over all ranks. Any other operation raises an error while a rank has joined.

    As in Horovod, join covers all ranks, not a process set. Call it after the set's last operation:
    a later one waits for this rank and fails after GTOPK_TIMEOUT. If this rank has called
    `backward()` without `step()`, join undoes that step here: the others take it without this
    rank's gradients, and its residual is restored.

    device: accepted for Horovod's scripts, not used.
    """
    everyone = global_process_set.members
    engine = global_process_set.engine
    # Abort first: the others must know that this rank's current step is void before it joins. If
    # not, its join shadow would run that step's other buckets, and messages would be mismatched.
    abort_steps(engine)
    last: int = engine.join().wait()
    # A rank that joined early has counted fewer unnamed operations.
    count = next(everyone.unnamed)
    counts = engine.submit(
        "join.unnamed", [], lambda transport, all_flags: all_flags, flags=count
    ).wait()
    # Continue from the largest count, so that names of unnamed operations match again.
    everyone.unnamed = itertools.count(max(counts))
    return last


def size() -> int:
    """Return the number of ranks."""
    return queried().size


def rank() -> int:
    """Return this process's rank."""
    return queried().rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return queried().local_size


def local_rank() -> int:
    """Return this rank's index on its host."""
    return queried().local_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return queried().cross_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a rank with this local rank."""
    return queried().cross_rank


def is_homogeneous() -> bool:
    """Tell whether all hosts have the same number of ranks."""
    return queried().is_homogeneous


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the world that a launcher started, or form a world of one; see `world.init`.

    comm: an mpi4py communicator, or the list of the launched ranks that form the world. Only those
        ranks call this. With MPI the other ranks must `import mpi4py.MPI`, which starts MPI.
    process_sets: the sets to register now; "dynamic" allows adding and removing sets later.
    """
    # Checked before the ranks join: a bad argument must not leave a world behind.
    requested = sets.requested_sets(process_sets)
    # A process forked from a lone rank may join a world of its own.
    if world.is_initialized() or (is_initialized() and size() > 1):
        return
    # Handles of an earlier world are invalid in this one.
    clear_handles()
    world.init(comm)
    try:
        for process_set in requested:
            sets.register(process_set)
    except BaseException:
        world.shutdown()  # a set that all ranks refuse must not leave a world behind either
        raise
