"""Counts the cores that this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Return how many physical cores this process may use, cut to its container's share; >= 1."""
    # Without a limit the quota is infinite, and infinity has no ceiling in integers.
    return max(1, min(len(allowed_cores()), math.ceil(min(core_quota(), 1 << 20))))


def allowed_cores(topology: Path = Path("/sys/devices/system/cpu")) -> frozenset[str]:
    """Return a name for each physical core that the affinity allows.

    Hardware threads of one core count once: Open MPI offers one slot per core, and numerics gain
    nothing from a second thread.
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


def core_quota(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the cores' worth of time that the control groups grant; infinity without a limit.

    A container limited so (docker run --cpus=2) still sees every core of its machine.
    """
    return granted_cores(membership, root)[0]


def granted_cores(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, str]:
    """Return the quota as `core_quota`, and a name of the control group whose members share it.

    The name is its device and inode: a container sees its group under another path than others do.
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
        # Inside a container the path may be the host's, of which only the top is mounted.
        here = top / path.lstrip("/")
        # Up to the top: the limit of a group also binds the groups in it.
        for directory in (here, *here.parents):
            if directory == top.parent:
                break
            quota = _quota_of(directory)
            if quota < lowest:
                status = directory.stat()
                lowest, group = quota, f"{status.st_dev}:{status.st_ino}"
    return lowest, group


def _quota_of(directory: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((directory / name).read_text() for name in names).split()
        except OSError:
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf
