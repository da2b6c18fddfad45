"""run: takes the arguments of horovod.run and starts the ranks.

It uses mpirun on this host or others, srun in its allocation, or torchrun on this host. Open MPI's
mpirun starts ranks on other hosts over ssh, with this process's environment.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, Final, NamedTuple

from ... import settings
from ..launch import LaunchError, find_mpirun, identify, mpirun_command, rank_environment
from ..launch.job import (
    Host,
    job,
    parse_hosts,
    read_hostfile,
    refuse_inside_a_job,
    refuse_too_few_slots,
    torchrun_command,
)
from ..launch.mpirun import Mpi, require_mpirun
from .call_server import CallServer, own_address
from .worker import BEGIN

# Variables for only this host, shell or job, which are not sent to other hosts.
_LOCAL_VARIABLES: re.Pattern[str] = re.compile(
    r"(OMPI|PMIX|PMI|PRTE|SLURM|SSH|XDG|BASH_FUNC)_.*|_|DISPLAY|HOME|HOSTNAME|LOGNAME|LS_COLORS|"
    r"OLDPWD|PWD|SHELL|SHLVL|TERM|TMPDIR|USER"
)


def refuse_other_than_open_mpi(mpi: Mpi) -> None:
    """Raise LaunchError unless gtopk can start ranks on other hosts with this MPI."""
    if mpi.vendor != "Open MPI":
        raise LaunchError(
            f"starting ranks on other hosts needs Open MPI's mpirun, found {mpi}; start the script "
            "with that MPI's own launcher, and let it call hvd.init() in place of gtopk.run"
        )


def host_options(hosts: Sequence[Host], environ: Mapping[str, str]) -> list[str]:
    """Return mpirun's options to start ranks on these hosts with this environment."""
    places = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    names = [
        name
        for name in sorted(environ)
        # mpirun's -x does not accept names like those of bash's exported functions.
        if re.fullmatch(r"[A-Za-z_]\w*", name) and not _LOCAL_VARIABLES.fullmatch(name)
    ]
    return ["--host", places, *(word for name in names for word in ("-x", name))]


def ssh_environment(port: int | None, identity_file: str | None) -> dict[str, str]:
    """Return the variables that tell Open MPI 4 and 5 how to call ssh."""
    arguments = []
    if port is not None:
        arguments += ["-p", str(port)]
    if identity_file is not None:
        arguments += ["-i", identity_file]
    if not arguments:
        return {}
    text = " ".join(arguments)
    return {"PRTE_MCA_plm_ssh_args": text, "OMPI_MCA_plm_rsh_args": text}


def interface_environment(interfaces: str) -> dict[str, str]:
    """Return the variables that restrict MPI, NCCL and gloo to these interfaces ("eth0,eth1")."""
    return {
        "OMPI_MCA_btl_tcp_if_include": interfaces,
        "OMPI_MCA_oob_tcp_if_include": interfaces,
        "PRTE_MCA_prte_if_include": interfaces,
        "NCCL_SOCKET_IFNAME": interfaces,
        "GLOO_SOCKET_IFNAME": interfaces,
    }


LAUNCHERS: Final = ("mpirun", "torchrun", "srun")


@dataclass(frozen=True)
class Places:
    """Hosts and launcher for the ranks; empty or None: this host, the launcher found here."""

    ranks: int
    hosts: Sequence[Host] = ()
    launcher: str | None = None  # one of LAUNCHERS
    mpi_args: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    interfaces: str | None = None
    python: str = sys.executable
    output_folder: str | None = None

    @property
    def remote_host(self) -> str | None:
        """Return the name of a host other than this one, if any."""
        return next((host.name for host in self.hosts if not host.is_this_one), None)


class Start(NamedTuple):
    """A launcher's command line, and the variables to add to its environment."""

    command: list[str]
    variables: dict[str, str]


def launch_command(places: Places, program: list[str], needed: Mapping[str, str]) -> Start:
    """Return how to start ranks of a program (its executable first) with these variables.

    Raises LaunchError if no launcher is available, ValueError if the hosts have too few slots.
    """
    variables = {**needed}
    if places.output_folder is not None:
        variables[settings.RUN_OUTPUT.name] = os.path.abspath(places.output_folder)
    if places.interfaces is not None:
        variables |= interface_environment(places.interfaces)
    if places.hosts:
        refuse_too_few_slots(places.hosts, places.ranks)
    launcher = places.launcher or default_launcher(places.hosts)
    if launcher == "srun":
        return _by_srun(places, program, variables)
    if launcher == "torchrun":
        return _by_torchrun(places, program, variables)
    return _by_mpirun(places, program, variables)


def default_launcher(hosts: Sequence[Host] = ()) -> str:
    """Return the launcher to use: mpirun, or torchrun for local ranks if MPI is incomplete."""
    # mpirun alone is not enough: the ranks join with mpi4py.
    complete = find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None
    return "torchrun" if not complete and all(host.is_this_one for host in hosts) else "mpirun"


def _by_srun(places: Places, program: list[str], variables: dict[str, str]) -> Start:
    from collectives.environment import whole_number  # imported late, as it needs NumPy

    if shutil.which("srun") is None:
        raise LaunchError(
            "srun is not on PATH: start the ranks inside a Slurm allocation, or use "
            "mpirun or torchrun"
        )
    if places.hosts or places.mpi_args is not None:
        raise ValueError("srun starts ranks in its allocation: pass neither hosts nor mpi_args")
    options = [f"--ntasks={places.ranks}"]
    cores = whole_number("SLURM_CPUS_PER_TASK", 0)  # srun does not inherit it since 22.05
    tasks = whole_number("SLURM_NTASKS", whole_number("SLURM_JOB_NUM_NODES", 1))
    if cores and places.ranks <= tasks:  # more ranks than tasks share the cores
        options.append(f"--cpus-per-task={cores}")
    return Start(["srun", *options, *program], variables)


def _by_torchrun(places: Places, program: list[str], variables: dict[str, str]) -> Start:
    if places.remote_host:
        raise LaunchError(
            f"torchrun starts ranks on this host, not on '{places.remote_host}': use mpirun "
            "(use_mpi=True), or start the script itself by torchrun on each host"
        )
    if places.mpi_args is not None:
        raise ValueError(f"mpi_args={places.mpi_args!r} needs mpirun; torchrun is used")
    # The other variables are for mpirun; without this one torchrun gives each rank one thread.
    if threads := rank_environment(places.ranks).get("OMP_NUM_THREADS"):
        variables = {"OMP_NUM_THREADS": threads, **variables}
    return Start(torchrun_command(places.ranks, program, places.python), variables)


def _by_mpirun(places: Places, program: list[str], variables: dict[str, str]) -> Start:
    mpirun = require_mpirun()
    try:
        options = shlex.split(places.mpi_args or "")
    except ValueError as error:  # an unclosed quotation
        raise ValueError(
            f"mpi_args must be words of a shell, got {places.mpi_args!r}: {error}"
        ) from None
    if places.remote_host:
        refuse_other_than_open_mpi(identify(mpirun))
        variables |= ssh_environment(places.ssh_port, places.ssh_identity_file)
    ranks_here = None if places.remote_host else places.ranks
    # The caller's settings come last and override.
    variables = {**rank_environment(ranks_here), **variables}
    if places.remote_host:
        options = [*host_options(places.hosts, {**os.environ, **variables}), *options]
    return Start(mpirun_command(mpirun, places.ranks, [*options, *program]), variables)


_ELASTIC: Final = (
    *("min_num_proc", "max_num_proc", "min_np", "max_np", "slots"),
    *("reset_limit", "cooldown_range", "host_discovery_script"),
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    allow_pickle: bool | None = None,
) -> list[Any]:
    """Call func(*args, **kwargs) on newly started ranks; return the results by rank.

    func:              passed by name, so other processes must be able to import it; a function in
                       the script itself works, too.
    num_proc, np:      number of ranks.
    hosts, hostfile:   "one:4,two:2", or a file with lines "one slots=4"; default: this host. With
                       other hosts, set OMP_NUM_THREADS yourself; it is passed on.
    use_mpi, use_gloo: start with mpirun, or with torchrun; default: mpirun if available.
    mpi_args:          further options for mpirun.
    start_timeout:     seconds for all ranks to begin (GTOPK_START_TIMEOUT, 120).
    output_filename:   a folder; rank r prints to rank.r/stdout and rank.r/stderr in it.
    executable:        the Python to run; default: this one.
    allow_pickle:      whether to pickle anything but plain data and named functions, in both
                       directions; default: as GTOPK_ALLOW_PICKLE says.
    disable_cache:     accepted but ignored: nothing is cached.
    Arguments for elastic jobs are refused: the number of ranks is fixed here.

    Raises RankError if a rank fails, with its number and traceback; LaunchError if ranks cannot be
    started; TypeError for values that cannot be encoded or have a wrong type; ValueError for
    invalid arguments. When it returns or raises, every process that it started has ended.
    """
    # First, while the arguments are the only local names.
    given = {name: value for name, value in locals().items() if name in _ELASTIC}
    _refuse_elastic({name: value for name, value in given.items() if value is not None})
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other; pass one of them")
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile exclude each other; pass one of them")
    if not callable(func):
        raise TypeError(f"func must be callable, got {func!r}")
    ranks = _whole_number(num_proc if np is None else np)
    _check_call(args, kwargs)
    texts = {"hosts": hosts, "mpi_args": mpi_args, "network_interface": network_interface}
    _check_words(**texts, network_interfaces=network_interfaces)
    if start_timeout:
        _check_seconds(start_timeout)
    if allow_pickle not in (None, True, False):  # rejects "no", which is truthy
        raise TypeError(f"allow_pickle must be True, False or None, got {allow_pickle!r}")
    refuse_inside_a_job()

    # Imported late: these import torch or collectives, which `import gtopk` does not need.
    from ..object_codec import pickle_allowed
    from .call import collect, pack

    may_pickle = pickle_allowed() if allow_pickle is None else allow_pickle
    messages = pack(func, args, kwargs or {}, may_pickle, _to_install())
    host_list = parse_hosts(hosts) if hosts else read_hostfile(hostfile) if hostfile else []
    places = Places(
        ranks,
        host_list,
        "torchrun" if use_gloo else "mpirun" if use_mpi else None,
        mpi_args,
        ssh_port,
        ssh_identity_file,
        network_interfaces or network_interface,
        executable or sys.executable,
        output_filename,
    )
    # If all ranks are on this host, other hosts cannot connect.
    server = CallServer(
        ranks, messages, own_address(places.remote_host) if places.remote_host else "127.0.0.1"
    )
    try:
        seconds = start_timeout or settings.START_TIMEOUT.read()  # 0 means None, as in Horovod
        variables = {**server.environment(), settings.START_TIMEOUT.name: str(seconds)}
        root = Path(__file__).parents[3]
        start = launch_command(places, [places.python, "-c", BEGIN, str(root)], variables)
        if verbose:
            print("gtopk.run:", " ".join(start.command), file=sys.stderr)
        with job(start.command, start.variables) as launcher:
            return collect(server, launcher, ranks, seconds, may_pickle)
    finally:
        server.close()


def _whole_number(ranks: object) -> int:
    try:
        number = index(ranks)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(ranks, bool):
        raise TypeError(f"num_proc must be a whole number, got {ranks!r}")
    if number < 1:
        raise ValueError(f"num_proc must be at least 1, got {number}")
    return number


def _check_call(args: object, kwargs: object) -> None:
    """Raise TypeError for arguments that `func(*args, **kwargs)` would misread or reject later."""
    if not isinstance(args, Iterable) or isinstance(args, str | bytes | Mapping):
        raise TypeError(
            f"args must be a list or tuple of arguments, got {args!r:.100}; for a single one "
            "pass args=(value,)"
        )
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"kwargs must be a dict of arguments by name, got {kwargs!r:.100}")


def _check_words(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a string, got {value!r:.100}")


def _check_seconds(timeout: object) -> None:
    if not isinstance(timeout, Real | Decimal) or isinstance(timeout, bool):
        raise TypeError(f"start_timeout must be a number of seconds, got {timeout!r}")
    if not float(timeout) > 0:
        raise ValueError(f"start_timeout must be more than 0 seconds, got {timeout}")


def _refuse_elastic(given: Mapping[str, Any]) -> None:
    if given:
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"gtopk.run starts a fixed number of ranks and does not support {options}: start a "
            "script that uses hvd.elastic.run with torchrun --nnodes=MIN:MAX --max-restarts=N, "
            "which restarts ranks"
        )


def _to_install() -> list[str]:
    """Return the modules that installed import finders here, for the ranks to install as well."""
    return [finder.installed_by for finder in sys.meta_path if hasattr(finder, "installed_by")]
