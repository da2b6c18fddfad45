"""Simulate: a reduction's trace on a platform, by the Python on this machine that has SimGrid."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ... import settings
from .platform import Platform
from .traces import Profile, Trace

_PROGRAM: Final = Path(__file__).with_name("on_simgrid.py")


class SimulationError(RuntimeError):
    """SimGrid is not here, or a replay has failed."""


def find_python(environ: Mapping[str, str] = os.environ) -> str:
    """Return the Python that has SimGrid: GTOPK_SIMGRID_PYTHON's, this one, or the system's.

    Raises SimulationError where none has.
    """
    asked = settings.SIMGRID_PYTHON.read(environ)
    tried = [asked] if asked else [sys.executable, "/usr/bin/python3", shutil.which("python3")]
    for python in filter(None, tried):
        try:
            found = subprocess.run(
                [python, "-c", "from simgrid import Engine"], capture_output=True, check=False
            )
        except OSError:  # none is there, or none that may be run
            continue
        if found.returncode == 0:
            return python
    raise SimulationError(
        f"simulating needs SimGrid's Python module, which {', '.join(filter(None, tried))} does "
        f"not have: apt-get install python3-simgrid (Debian), or name a Python that has it in "
        f"{settings.SIMGRID_PYTHON.name}"
    )


def simulate(
    trace: Trace, platform: Platform, python: str, computing: Profile | None = None
) -> float:
    """Return the simulated seconds until the last rank is done with its messages.

    computing: what ranks do between them; what lets a burst pass recovers meanwhile. None: nothing.
    Raises ValueError where it is of another trace, or the trace of another number of ranks.
    Raises SimulationError where the replay fails.
    """
    platform.check()
    if len(trace) != platform.network.ranks:
        raise ValueError(f"a trace of {len(trace):,} ranks on {platform.network.ranks:,} of them")
    if computing is not None and [*map(len, computing)] != [len(each) + 1 for each in trace]:
        raise ValueError("what ranks compute must be told before each event, and after the last")
    order = json.dumps({"platform": platform.record(), "trace": trace, "computing": computing})
    try:
        done = subprocess.run(
            [python, str(_PROGRAM)],
            input=order,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise SimulationError(f"{python} cannot be run: {error.strerror}") from None
    if done.returncode or not done.stdout:
        raise SimulationError(
            f"SimGrid has failed on {len(trace):,} ranks, each a thread of its own, of which a "
            f"system may allow fewer; exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])
