"""A job: a launcher and the ranks it starts, of which no process outlives the block."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from ... import settings
from ...errors import LaunchError
from .launched import launched_by

_GRACE_SECONDS: Final = 3.0  # what the launcher gets to end its ranks before we do

# Becomes the launcher, after asking the kernel to end it should we be killed (prctl 1:
# PR_SET_PDEATHSIG).
_BECOME_LAUNCHER: Final = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


@contextmanager
def job(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher with these variables added to the environment; end it and its ranks.

    Should this process be killed, Linux ends the launcher, and the launcher its ranks.
    """
    token = uuid.uuid4().hex
    if sys.platform == "linux":
        command = [sys.executable, "-IS", "-c", _BECOME_LAUNCHER, str(os.getpid()), *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **variables, settings.JOB.name: token},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process, token)


def refuse_inside_a_job() -> None:
    """Raise LaunchError where this process is itself a rank of several."""
    outer = launched_by()
    if outer is not None and outer.size > 1:
        raise LaunchError(
            f"this process is already rank {outer.rank} of {outer.size}, started by "
            f"{outer.launcher}; a command that starts ranks itself must be run without it"
        )


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """End the launcher, if it has not ended, and every process of its job that is left.

    The launcher alone is not enough: mpirun puts ranks into process groups (MPICH: sessions) of
    their own, and MPICH's waits for ranks that ignore SIGTERM.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    if process.poll() is None:
        process.kill()
    process.wait()
    for _ in range(100):  # a dying job may still start a process; 5 s at most
        left = _processes_of(token)
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if process.stdout is not None:
        process.stdout.close()


def _processes_of(token: str) -> list[int]:
    """Return the living processes whose environment names the job; none where there is no /proc."""
    needle = f"{settings.JOB.name}={token}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            if needle in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found
