"""Processes that tests start: their PYTHONPATH, and their results."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar
from unittest.mock import patch

import pytest

P = ParamSpec("P")
T = TypeVar("T")
ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"
# First on their path: it keeps them from loading the parts of torch that only its compiler needs.
LIGHT = str(PROGRAMS / "light")
STARTED_PATH = os.pathsep.join([LIGHT, str(ROOT)])
# The path of ranks under MPI, which ask CuPy for GPUs.
RANKS_PATH = os.pathsep.join([STARTED_PATH, str(PROGRAMS / "without_gpu")])
with contextlib.suppress(OSError):
    ctypes.CDLL("libcuda.so.1")
    RANKS_PATH = STARTED_PATH


def under(environ: Mapping[str, str], call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a call returns if the environment has these variables alone."""
    with patch.dict(os.environ, environ, clear=True):
        return call(*args, **kwargs)


class Job(NamedTuple):
    """The result of a program under a launcher."""

    returncode: int
    stdout: str
    stderr: str


def stacks_before(timeout: float) -> dict[str, str]:
    """Return variables that make started Pythons print their threads' stacks before the timeout.

    Not for programs that fork and end normally: a child would wait for its parent's watcher thread.
    """
    return {"STACKS_AFTER_SECONDS": f"{0.9 * timeout:g}"}


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
    except subprocess.TimeoutExpired:
        launcher.terminate()  # ends its ranks, too
        try:
            stdout, stderr = launcher.communicate(timeout=20)
        finally:
            launcher.kill()
        pytest.fail(f"not done in {timeout:g} s; its output so far:\n{stdout}{stderr}")
    finally:
        if launcher.poll() is None:
            launcher.kill()
    return Job(launcher.returncode, stdout, stderr)
