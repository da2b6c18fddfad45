"""Description of the machine that a measurement ran on."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import TypedDict

import numpy as np

from collectives import kernels
from collectives.cores import usable_cores

from .. import __version__


class Machine(TypedDict, total=False):
    """The machine, software versions and time of a measurement."""

    processor: str
    cores: int  # available to this process
    kernels: str
    python: str
    numpy: str
    gtopk: str
    started: str  # ISO 8601
    load_before: float  # load average of the last minute
    load_after: float  # set by the benchmark at its end


def this_machine() -> Machine:
    """Return the current state of this machine, without `load_after`."""
    return Machine(
        processor=processor(),
        cores=usable_cores(),
        kernels=kernels.in_use(),
        python=platform.python_version(),
        numpy=np.__version__,
        gtopk=__version__,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        load_before=load(),
    )


def load() -> float:
    """Return the load average over the last minute."""
    return round(os.getloadavg()[0], 2)


def processor() -> str:
    """Return the processor's name if the kernel reports it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
