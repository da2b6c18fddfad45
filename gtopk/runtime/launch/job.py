"""A job: a launcher and the ranks it starts, of which no process outlives the block.

Its hosts have names, and slots for so many ranks each; one of them may be this host.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

from ... import settings
from ...errors import LaunchError
from .launched import launched_by


class Host(NamedTuple):
    """A host and how many ranks it takes."""

    name: str
    slots: int

    @property
    def is_this_one(self) -> bool:
        """Tell whether the name means the host that this process is on."""
        own = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", own, own.split(".")[0])


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts in "one:4,two:2"; a name alone takes one rank."""
    hosts = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([^\s:,]+)(?::(\d+))?\s*", word)
        if match is None or match[2] == "0":
            raise ValueError(f"hosts must look like 'one:4,two:2', got {text!r}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    return hosts


def read_hostfile(path: str | Path) -> list[Host]:
    """Return the hosts of a file with a line "name slots=4" for each; # begins a comment."""
    hosts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"([^\s:]+)(?:\s+slots\s*=\s*([1-9]\d*))?", words)
        if match is None:
            raise ValueError(f"a line of {path} must look like 'name slots=4', got {line!r}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    if not hosts:
        raise ValueError(f"{path} must name a host, and names none")
    return hosts


def refuse_too_few_slots(hosts: Sequence[Host], ranks: int) -> None:
    """Raise ValueError where the hosts take fewer ranks than there are."""
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        named = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"{ranks} ranks need as many slots, and the hosts ({named}) have {slots}; give a host "
            "more as name:slots"
        )


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
