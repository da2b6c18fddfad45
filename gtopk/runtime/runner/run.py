"""run: the function itself, with the arguments of horovod.run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ... import settings
from ..launch.job import job, parse_hosts, read_hostfile, refuse_inside_a_job
from .call_server import CallServer, own_address
from .ranks import Places, start_of

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
    """Call func(*args, **kwargs) on so many ranks, started for it; return the results by rank.

    func:              by its name: one that other processes can import, the script's own included.
    num_proc, np:      how many ranks.
    hosts, hostfile:   "one:4,two:2", or a file with lines "one slots=4"; default: this host. With
                       other hosts OMP_NUM_THREADS is yours to set, and goes along.
    use_mpi, use_gloo: start them by mpirun, or by torchrun; default: mpirun where there is one.
    mpi_args:          further options of mpirun.
    start_timeout:     the seconds that all ranks get to begin (GTOPK_START_TIMEOUT, 120).
    output_filename:   a folder; rank r prints to rank.r/stdout and rank.r/stderr in it.
    executable:        the Python to run; default: this one.
    allow_pickle:      whether what is neither plain data nor a function with a name travels as a
                       pickle, both ways; default: as GTOPK_ALLOW_PICKLE says.
    disable_cache:     accepted: nothing is cached.
    The arguments of elastic jobs are refused: the number of ranks is fixed here.

    Raises RankError when a rank fails, with its number and traceback; LaunchError when ranks cannot
    be started; TypeError for what cannot travel; ValueError for arguments that make no sense. When
    it returns or raises, every process that it started has ended.
    """
    given = {name: value for name, value in locals().items() if name in _ELASTIC}
    _refuse_elastic({name: value for name, value in given.items() if value is not None})
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other; pass one of them")
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile exclude each other; pass one of them")
    if not callable(func):
        raise TypeError(f"func must be callable, got {func!r}")
    ranks = num_proc if np is None else np
    if ranks < 1:
        raise ValueError(f"num_proc must be at least 1, got {ranks}")
    refuse_inside_a_job()

    # These import torch or collectives, which `import gtopk` needs not.
    from ..object_codec import pickle_allowed
    from .call import collect, pack

    may_pickle = pickle_allowed() if allow_pickle is None else allow_pickle
    messages = pack(func, args, kwargs or {}, may_pickle, _to_install())
    named = parse_hosts(hosts) if hosts else read_hostfile(hostfile) if hostfile else []
    places = Places(
        ranks,
        named,
        "torchrun" if use_gloo else "mpirun" if use_mpi else None,
        mpi_args,
        ssh_port,
        ssh_identity_file,
        network_interfaces or network_interface,
        executable or sys.executable,
        output_filename,
    )
    server = CallServer(
        ranks, messages, own_address(places.elsewhere) if places.elsewhere else "127.0.0.1"
    )
    try:
        seconds = start_timeout or settings.START_TIMEOUT.read()
        variables = {**server.environment(), settings.START_TIMEOUT.name: str(seconds)}
        start = start_of(places, variables)
        if verbose:
            print("gtopk.run:", " ".join(start.command), file=sys.stderr)
        with job(start.command, start.variables) as launcher:
            return collect(server, launcher, ranks, seconds, may_pickle)
    finally:
        server.close()


def _refuse_elastic(given: Mapping[str, Any]) -> None:
    if given:
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"gtopk.run starts a fixed number of ranks and has no use for {named}: start a script "
            "with hvd.elastic.run by torchrun --nnodes=MIN:MAX --max-restarts=N, which starts "
            "ranks anew"
        )


def _to_install() -> list[str]:
    """Return the modules whose finders this process was given: ranks are to find what it finds."""
    return [finder.installed_by for finder in sys.meta_path if hasattr(finder, "installed_by")]
