"""Worlds for tests: threads in this process, or real ranks under mpirun."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.launch import run

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"


class Job(NamedTuple):
    """What a program under mpirun left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., Job]:
    """Run `mpirun(ranks, program, *arguments)`: a file of tests/programs, or a path from the root.

    An uncaught exception on any rank ends the program with an exit code that is not 0.
    """

    def start(
        ranks: int, program: str, *arguments: str, timeout: float = 120, **variables: str
    ) -> Job:
        path = PROGRAMS / program if (PROGRAMS / program).exists() else ROOT / program
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as errors:
            for name, value in {"PYTHONPATH": str(ROOT), **variables}.items():
                patch.setenv(name, value)
            code = run(
                ranks,
                [sys.executable, str(path), *arguments],
                on_line=lines.append,
                timeout_seconds=timeout,
                errors=errors,
            )
            errors.seek(0)
            stderr = errors.read().decode(errors="replace")
        return Job(code, "\n".join(lines), stderr)

    return start


@pytest.fixture
def threads() -> Callable[..., list[object]]:
    """Run `threads(size, program)`: `program(transport)` on `size` ranks of a local world."""

    def run(size: int, program: Callable[[LocalTransport], object]) -> list[object]:
        return run_ranks(local_world(size, timeout_seconds=30), program)

    return run


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20191)
