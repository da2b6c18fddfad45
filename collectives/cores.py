"""How many cores this process may use, and how many threads a kernel gets.

A kernel's loops use this rank's share of the machine's cores, at least one. The launcher's
environment variables tell how many ranks share the machine.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from . import environment


def usable_cores() -> int:
    """Return how many physical cores this process may use, cut to its container's share; >= 1."""
    return max(1, math.ceil(shared_cores([own_cores()])))


def allowed_cores(topology: Path = Path("/sys/devices/system/cpu")) -> frozenset[str]:
    """Return a name for each physical core that the affinity allows.

    Hardware threads of one core count once: Open MPI offers one slot per core, and a second thread
    on a core does not speed up numerics.
    """
    if hasattr(os, "sched_getaffinity"):
        threads = os.sched_getaffinity(0)
    else:
        threads = set(range(os.cpu_count() or 1))
    return frozenset(_core_of(thread, topology) for thread in threads)


def _core_of(thread: int, topology: Path) -> str:
    try:
        return (topology / f"cpu{thread}/topology/thread_siblings_list").read_text().strip()
    except OSError:  # no such file in some sandboxes: count every thread
        return str(thread)


def granted_cores(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, str]:
    """Return the CPU quota, in cores, and an identifier of the control group that shares it.

    The affinity does not show the quota: after docker run --cpus=2 a process still sees every core.
    It is infinite without a limit. The identifier is the group's device and inode: its path differs
    from container to container.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf, ""
    lowest, group = math.inf, ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        # Inside a container the path may be the host's, while only the top of the tree is mounted.
        own_group = top / path.lstrip("/")
        # Every ancestor's limit applies, too.
        for directory in (own_group, *own_group.parents):
            if directory == top.parent:
                break
            quota = _quota_of(directory)
            if quota < lowest:
                status = directory.stat()
                lowest, group = quota, f"{status.st_dev}:{status.st_ino}"
    return lowest, group


def own_cores() -> tuple[list[str], float, str]:
    """Return the names of the cores that this process may use, its quota, and its control group."""
    return sorted(allowed_cores()), *granted_cores()


def shared_cores(processes: Sequence[tuple[Sequence[str], float, str]]) -> float:
    """Return how many cores processes of one host have together.

    processes: `own_cores` of each. They may be bound to different cores, and have different quotas.
    """
    names = {name for names, _, _ in processes for name in names}
    quotas = {group: quota for _, quota, group in processes}
    return min(len(names), sum(quotas.values()))


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Return an identifier of this machine, the same in containers with other host names."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not on Linux
        return socket.gethostname()


def _quota_of(directory: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((directory / name).read_text() for name in names).split()
        except OSError:
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


# Open MPI, MPICH and Intel MPI, MVAPICH, torchrun, Horovod.
_COUNTS: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
)


def local_ranks() -> int:
    """Return how many ranks run on this machine; 1 if no launcher's variable says."""
    counts = [os.environ.get(name, "") for name in _COUNTS]
    if in_slurm_step():
        counts += [_node_tasks(), os.environ.get("SLURM_NTASKS_PER_NODE", "")]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def in_slurm_step() -> bool:
    """Tell whether srun started this process; a batch script has SLURM's other variables, too."""
    return "SLURM_STEP_ID" in os.environ


def _node_tasks() -> str:
    """Return SLURM's tasks on this node: with "8(x2),4" nodes 0 and 1 have 8, node 2 has 4."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = itertools.chain.from_iterable([count] * int(times or 1) for count, times in found)
    node = os.environ.get("SLURM_NODEID", "0")
    return next(itertools.islice(tasks, int(node) if node.isdecimal() else 0, None), "")


# A few cores saturate the memory bandwidth; more threads would only slow down autograd.
_MAX_THREADS: Final = 8
_MAX_REQUESTED: Final = 1 << 10  # the C interface takes 32 bits

# Set by `use_threads`, for the current thread only.
requested_threads: ContextVar[int | None] = ContextVar("threads", default=None)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run the kernels that the current thread calls inside the context on `count` threads."""
    token = requested_threads.set(count)
    try:
        yield
    finally:
        requested_threads.reset(token)


@functools.cache
def default_threads() -> int:
    """Return GTOPK_THREADS, up to 1024, or this rank's share of the usable cores; >= 1.

    The share is SLURM's --cpus-per-task if that was given, within the affinity and the container's
    quota.

    Raises ValueError for a GTOPK_THREADS that is not a positive number.
    """
    if requested := environment.threads():
        return min(requested, _MAX_REQUESTED)
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "") if in_slurm_step() else ""
    share = int(granted) if granted.isdecimal() else usable_cores() // local_ranks()
    # SLURM's share may be more than the affinity, or the container, allows.
    return max(1, min(_MAX_THREADS, share, usable_cores()))
