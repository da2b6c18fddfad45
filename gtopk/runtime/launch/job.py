"""A job: a launcher and the ranks that it starts.

`job` starts a launcher, and ends all its processes when the block ends.
`torchrun_command` is a launcher command for one machine without MPI.
`launched_by` tells which launcher started this process, and its rank and size.
The launcher is this process's parent: `launcher_has_ended` tells whether it has ended, `ranks_here`
how many ranks it has started here.
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
from ..liveness.watchdog import variable_of


def torchrun_command(ranks: int, program: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command that runs `program` (its executable first) on `ranks` ranks here.

    torchrun does not parse arguments after --. So it neither drops a -- of the program, nor takes
    an argument such as --log for an abbreviation of its own.
    """
    # The ranks would wait for this host's name to resolve.
    local = "--local-addr=127.0.0.1"
    return [
        *(python, "-m", "torch.distributed.run", "--standalone", local),
        *(f"--nproc-per-node={ranks}", "--no-python", "--", *program),
    ]


class Launched(NamedTuple):
    """A launcher's rank and size; `variables`: the environment variables of both."""

    launcher: str
    rank: int
    size: int
    variables: tuple[str, str]


# Name, rank variable, size variable.
_TORCHRUN = ("torchrun", "RANK", "WORLD_SIZE")
# The innermost launcher first: srun with PMI starts shells, and agents pass on their variables to
# their ranks. RANK comes last, as users also set it by hand.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("a PMI launcher", "PMI_RANK", "PMI_SIZE"),  # MPICH's mpirun, or srun
    _TORCHRUN,
)
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TORCHRUN_WORKER = "TORCHELASTIC_RUN_ID"  # only set by torchrun's agent, for its workers
# The step's size, not the job's: a batch script has the job's without being a rank.
_SRUN = ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def launchers() -> list[Launched]:
    """Return the rank and size of every launcher with set variables, the innermost first.

    A launcher that started torchrun's agent does not count. srun only counts without another one,
    as it also starts mpirun's daemons.
    """
    worker = _launched_from(_TORCHRUN) if os.environ.get(_TORCHRUN_WORKER) else None
    if worker is not None and worker.size > 1:
        return [worker]
    found = [launched for names in _LAUNCHERS if (launched := _launched_from(names))]
    if not found and (launched := _launched_from(_SRUN)):
        found.append(launched)
    return found


def launched_by() -> Launched | None:
    """Return the launcher that started this process as a rank; None if it runs alone."""
    launched = launchers()
    # A single MPI rank also joins with MPI; a single rank of another launcher runs alone.
    return next((s for s in launched if s.variables[1] in _MPI_SIZES or s.size > 1), None)


def require_sound_ranks() -> None:
    """Raise RuntimeError if a rank's number does not fit its size.

    Otherwise users who count ranks from 1, or set WORLD_SIZE too small, would wait in vain.
    """
    for launcher, rank, size in (*_LAUNCHERS, _SRUN):
        if not os.environ.get(rank) or not os.environ.get(size):  # empty counts as unset
            continue
        given = f"{rank}={os.environ[rank]} and {size}={os.environ[size]} ({launcher})"
        try:
            number, count = int(os.environ[rank]), int(os.environ[size])
        except ValueError:
            raise RuntimeError(f"{rank} and {size} must be whole numbers, got {given}") from None
        if count < 1:
            raise RuntimeError(f"{size} must be at least 1, got {given}")
        if not 0 <= number < count:
            raise RuntimeError(
                f"{rank} must lie in 0..{count - 1}, got {number}: {given}; ranks are "
                f"numbered from 0, and {size} is the number of ranks"
            )


# Variables that, with rank and size, distinguish a rank from those of other jobs.
_JOB_VARIABLES: Final = (
    *("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_STEP_ID"),
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", settings.JOB.name),
)


def _identity(job: Launched) -> str:
    return " ".join(os.environ.get(name, "-") for name in (*job.variables, *_JOB_VARIABLES))


def mark_joined(job: Launched) -> None:
    """Mark this process as the launcher's rank, for processes that it starts."""
    os.environ[settings.JOINED.name] = f"{os.getpid()} {_identity(job)}"


def require_own_rank(job: Launched) -> None:
    """Raise RuntimeError if this process was started by a process that is already the rank.

    The other ranks do not know a second process of one rank: MPI's start would wait for ever, and
    so would the job.
    """
    pid, _, identity = settings.JOINED.text().partition(" ")
    if identity != _identity(job) or int(pid) == os.getpid():
        return
    try:
        os.kill(int(pid), 0)
    except OSError:
        return  # the marked process has ended
    unset = " ".join(f"-u {name}" for name in job.variables)
    raise RuntimeError(
        f"rank {job.rank} of {job.launcher} is process {pid}, which started this one: only process "
        f"{pid} can use gtopk as this rank; to train without the other ranks, start this process "
        f"with `env {unset} python ...`"
    )


def transport_name(job: Launched | None) -> str:
    """Return the name of the transport for this environment and launcher."""
    return settings.TRANSPORT.read() or launcher_transport(job)


def launcher_transport(job: Launched | None) -> str:
    """Return the name of the transport for this launcher."""
    if job is None:
        return "local"
    # srun --mpi=pmix sets only PMIX_RANK, which child processes of its tasks inherit.
    by_pmix = job.launcher == _SRUN[0] and os.environ.get("PMIX_RANK")
    if job.variables[1] in _MPI_SIZES or by_pmix:
        return "mpi"
    return "torch.distributed" if job.size > 1 else "local"


def _launched_from(names: tuple[str, str, str]) -> Launched | None:
    launcher, rank, size = names
    try:
        return Launched(launcher, int(os.environ[rank]), int(os.environ[size]), (rank, size))
    except (KeyError, ValueError):
        return None


# By rank variable: a variable that only ranks have, and the one with the number of ranks that the
# launcher starts on a host.
_RANK_VARIABLES: Final = {
    "RANK": ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_RANK": ("PMI_RANK", "MPI_LOCALNRANKS"),
}
_CONNECT_TIMEOUT_SECONDS: Final = 1.0

_parent = os.getppid()  # at import: an orphan is adopted later


def _read_parent() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_read_parent)


def torchrun_agent() -> int:
    """Return the pid of torchrun's agent if it started this process, even if gone; else 0."""
    return _parent if os.environ.get("TORCHELASTIC_RUN_ID") else 0


def launcher() -> int:
    """Return the pid of torchrun's agent or Open MPI's daemon that started this process; else 0.

    It is 0 for a RANK set by hand, as the shell that started the rank may end before it.
    """
    return torchrun_agent() or (_parent if os.environ.get("OMPI_COMM_WORLD_RANK") else 0)


def ranks_here(job: Launched) -> int:
    """Return how many ranks of a job this process's parent has started; 0 if unknown.

    It is unknown if, for example, the parent is a shell between the launcher and this rank. A
    single rank also gets 0: no other can be missing.
    """
    marker, count = _RANK_VARIABLES.get(job.variables[0], ("", ""))
    # A parent that has the variable itself is a rank's shell, not a launcher.
    if marker not in os.environ or variable_of(_parent, marker) != "":
        return 0
    text = os.environ.get(count, "")
    return int(text) if text.isdecimal() and int(text) > 1 else 0


def launcher_has_ended() -> bool:
    """Tell whether the launcher that started this process has ended."""
    parent = launcher()
    if not parent:
        return False
    return os.getppid() != parent or (not torchrun_agent() and _daemon_is_gone())


def _daemon_is_gone() -> bool:
    """Tell whether Open MPI's daemon on this host has stopped listening at its ranks' address.

    This detects a daemon that ended before this module was imported.
    """
    uris = (value for name, value in os.environ.items() if name.startswith("PMIX_SERVER_URI"))
    match = next(filter(None, (re.search(r"tcp4://([\d.]+):(\d+)", uri) for uri in uris)), None)
    if match is None:
        return False
    try:
        socket.create_connection((match[1], int(match[2])), _CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        # Refused: nobody listens there any more. A timeout proves nothing.
        return isinstance(error, ConnectionRefusedError)
    return False


def own_place() -> str:
    """Return this process's host and pid, as shown in errors."""
    return f"host {socket.gethostname()}, pid {os.getpid()}"


class Host(NamedTuple):
    """A host's name, and its number of slots for ranks."""

    name: str
    slots: int

    @property
    def is_this_one(self) -> bool:
        """Tell whether the name refers to this process's host."""
        own = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", own, own.split(".")[0])


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts in "one:4,two:2"; a bare name has one slot."""
    hosts = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([^\s:,]+)(?::([1-9]\d{0,8}))?\s*", word)
        if match is None:
            raise ValueError(f"hosts must look like 'one:4,two:2', got {text!r}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    return hosts


def read_hostfile(path: str | Path) -> list[Host]:
    """Return the hosts in a file with lines "name slots=4"; # begins a comment."""
    hosts = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"([^\s:]+)(?:\s+slots\s*=\s*([1-9]\d{0,8}))?", words)
        if match is None:
            raise ValueError(f"a line of {path} must look like 'name slots=4', got {line!r:.80}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    if not hosts:
        raise ValueError(f"{path} must name at least one host")
    return hosts


def refuse_too_few_slots(hosts: Sequence[Host], ranks: int) -> None:
    """Raise ValueError if the hosts have fewer slots than there are ranks."""
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"{ranks} ranks need {ranks} slots, but the hosts ({listed}) have {slots}; add slots "
            "as name:slots"
        )


_GRACE_SECONDS: Final = 3.0  # for the launcher to end its ranks before this process does

# A program that asks the kernel to end it if this process is killed (prctl 1: PR_SET_PDEATHSIG),
# then becomes the launcher.
# It checks its parent after prctl, as the kernel sends no signal for a parent that ended before.
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
    """Start a launcher with these variables added; end it and its ranks when the block ends.

    If this process is killed, Linux ends the launcher, and the launcher its ranks.
    """
    token = uuid.uuid4().hex
    if sys.platform == "linux":
        command = [sys.executable, "-IS", "-c", _BECOME_LAUNCHER, str(os.getpid()), *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        # `_end` finds the job's processes with the token, in whatever groups and sessions.
        env={**os.environ, **variables, settings.JOB.name: token},
        # Ctrl-C at a terminal must reach only this process, which decides how the job ends.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process, token)


def refuse_inside_a_job() -> None:
    """Raise LaunchError if this process is itself one of several ranks."""
    outer = launched_by()
    if outer is not None and outer.size > 1:
        raise LaunchError(
            f"this process is already rank {outer.rank} of {outer.size}, started by "
            f"{outer.launcher}; run a command that starts ranks itself outside of a launcher"
        )


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """End the launcher, if it still runs, and every remaining process of its job.

    Ending only the launcher is not enough: mpirun puts ranks into their own process groups (MPICH:
    sessions), and MPICH's mpirun waits for ranks that ignore SIGTERM.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    if process.poll() is None:
        process.kill()
    process.wait()
    for _ in range(100):  # 5 s at most: a dying job may still start a process
        remaining = _processes_of(token)
        if not remaining:
            break
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if process.stdout is not None:
        process.stdout.close()


def _processes_of(token: str) -> list[int]:
    """Return the living processes with the job's token in their environment; [] without /proc."""
    needle = f"{settings.JOB.name}={token}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            if needle in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found
