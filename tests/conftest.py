"""Worlds for tests: threads in this process, or real ranks under mpirun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.launch import find_mpirun, mpirun_command, rank_environment

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"

Mpirun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def mpirun() -> Mpirun:
    """Run `mpirun(ranks, program, *arguments)`: a file of tests/programs, or a path from the root.

    An uncaught exception on any rank ends the program with an exit code that is not 0.
    """
    import os

    launcher = find_mpirun()
    assert launcher is not None, "the tests need an mpirun: pip install gtopk[dev]"

    def run(
        ranks: int, program: str, *arguments: str, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = PROGRAMS / program if (PROGRAMS / program).exists() else ROOT / program
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        environment |= rank_environment(ranks, environment)
        return subprocess.run(
            mpirun_command(launcher, ranks, [sys.executable, str(path), *arguments]),
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def threads() -> Callable[..., list[object]]:
    """Run `threads(size, program)`: `program(transport)` on `size` ranks of a local world."""

    def run(size: int, program: Callable[[LocalTransport], object]) -> list[object]:
        return run_ranks(local_world(size, timeout_seconds=30), program)

    return run


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20191)
