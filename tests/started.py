"""Processes that tests start: what is on their path, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"
# What is first on their path: of torch they load nothing that only its compiler needs.
LIGHT = str(PROGRAMS / "light")
STARTED_PATH = os.pathsep.join([LIGHT, str(ROOT)])


class Job(NamedTuple):
    """What a program under a launcher left behind."""

    returncode: int
    stdout: str
    stderr: str


def finished(command: list[str], timeout: float, variables: dict[str, str]) -> Job:
    """Run a launcher to its end."""
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": STARTED_PATH, "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        stdout, stderr = launcher.communicate(timeout=timeout)
    finally:
        if launcher.poll() is None:
            launcher.terminate()  # it ends its ranks
            launcher.communicate()
    return Job(launcher.returncode, stdout, stderr)
