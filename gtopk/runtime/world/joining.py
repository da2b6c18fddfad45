"""Joining: connect the ranks; from launcher variables or mpi4py communicators to a transport.

Only for `init`. `hvd.join`, which announces that a rank has no more data, is `Engine.join`.

    launcher                             transport
    mpirun, srun with PMI or PMIx        mpi
    torchrun, horovodrun, plain srun     torch.distributed (gloo)
    none                                 torch.distributed within a process group, else local

GTOPK_TRANSPORT selects another one. Two run on top of the launcher's: "nccl" sends GPU messages
over NCCL, "staged" through pinned host memory. Without it, membership.py puts NCCL on top of the
launcher's if every rank has a GPU.

A watchdog ends a start that Python code cannot interrupt: MPI's start waits for ever for a rank
that has ended.

Without MPI, ranks rendezvous at torch.distributed's store, served by rank 0:

MASTER_ADDR, MASTER_PORT    at this address, if both are set (by torchrun or anyone)
horovodrun                  where rank 0 publishes on horovodrun's key-value server (HTTP)
srun                        on the step's first node, port 20000 + (16 job + step) mod 10000
"""

from __future__ import annotations

import http.client
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch

from collectives.environment import whole_number
from collectives.errors import PeerError, PeerTimeoutError
from collectives.transports import TRANSPORTS, Transport, open_transport

from ... import settings
from ..launch import Launched, launched_by, launcher_transport, require_sound_ranks
from ..launch.job import launcher, launcher_has_ended, own_place, ranks_here
from ..liveness.heartbeat import address_towards
from ..liveness.watchdog import Siblings, WatchdogSettings, deadline
from ..standard_streams import occupy_closed_descriptors
from . import guard

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

_KEY: Final = "/gtopk/store"
_RETRY_SECONDS: Final = 0.1  # between two requests for rank 0's address
_REQUEST_SECONDS: Final = 5.0
_ADDRESS_BYTES: Final = 300  # a host name has at most 255


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def master() -> Address | None:
    """Return the address in MASTER_ADDR and MASTER_PORT; None if they are not set.

    Raises ValueError if the port is not a number.
    """
    if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        return None
    port = whole_number("MASTER_PORT", None, least=0)
    return Address(os.environ["MASTER_ADDR"], port)


def srun_address() -> Address:
    """Return the rendezvous address of a Slurm step, which every rank derives from its variables.

    Raises RuntimeError if Slurm's variables are not sufficient.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_STEP_ID", "0"))
        # A different port for each step of a job, and for concurrent jobs.
        return Address(first_node(nodes), 20000 + (16 * job + step) % 10000)
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            f"the rendezvous needs srun's SLURM_JOB_ID and SLURM_STEP_NODELIST ({error}); "
            "set MASTER_ADDR and MASTER_PORT to a host of rank 0 and a free port there"
        ) from None


def first_node(nodes: str) -> str:
    """Return the first host of Slurm's list, e.g. n007 of "n[007-012,30],m1".

    Raises ValueError if the text is not such a list.
    """
    match = re.match(r"([^\s,\[\]]*)(?:\[([^\],-]+)[^\]]*\])?([^\s,\[\]]*)(?:,|$)", nodes)
    if match is None or not match.group(0).strip(","):
        raise ValueError(f"no list of nodes: {nodes!r}")
    return "".join(part or "" for part in match.groups())


class HorovodrunServer:
    """horovodrun's key-value server, which Horovod's own gloo ranks use for rendezvous."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._url = f"http://{address}{_KEY}"
        # Bypass the environment's HTTP proxy, which is for hosts outside the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def publish(self, address: Address, timeout_seconds: float) -> None:
        """Publish the rendezvous address, as rank 0; raises the same errors as `fetch`."""
        self._request(0, "PUT", str(address).encode(), timeout_seconds, bytes)

    def fetch(self, rank: int, timeout_seconds: float) -> Address:
        """Wait until rank 0 has published the rendezvous address; rank: this one, for an error.

        Raises PeerTimeoutError after the timeout, HTTPError if the server refuses.
        """
        return self._request(rank, "GET", None, timeout_seconds, _read_address)

    def _request(
        self,
        rank: int,
        method: str,
        body: bytes | None,
        timeout_seconds: float,
        read: Callable[[bytes], T],
    ) -> T:
        """Return `read(answer)`; retry while the server is busy or drops the connection."""
        request = urllib.request.Request(self._url, body, method=method)
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                with self._opener.open(request, timeout=_REQUEST_SECONDS) as response:
                    return read(response.read(_ADDRESS_BYTES))
            except (OSError, http.client.HTTPException, ValueError) as error:
                # Under many simultaneous requests a server refuses, resets, or answers too late.
                code = error.code if isinstance(error, urllib.error.HTTPError) else 0
                is_unpublished = (method, code) == ("GET", 404)
                # Client errors are final, except this one: rank 0 has not published yet.
                if 400 <= code < 500 and not is_unpublished:
                    raise
                if time.monotonic() > deadline:
                    absent = (
                        "rank 0, which has not published the rendezvous address"
                        if is_unpublished
                        else f"horovodrun's server at {self.address}, where rank 0 publishes the "
                        f"rendezvous address: {error}"
                    )
                    raise PeerTimeoutError(
                        f"rank {rank} has waited {timeout_seconds:g} s at the start for {absent}"
                    ) from None
            time.sleep(_RETRY_SECONDS)


def _read_address(answer: bytes) -> Address:
    """Parse an answer; raise ValueError if it is not an address."""
    host, port = answer.decode().rsplit(":", 1)
    return Address(host, int(port))


def horovodrun_server() -> HorovodrunServer | None:
    """Return horovodrun's server if the environment names one."""
    try:
        host = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    except (KeyError, ValueError):
        return None
    return HorovodrunServer(Address(host, port))


def is_communicator(comm: object) -> bool:
    """Tell whether this is an mpi4py communicator."""
    return hasattr(comm, "Split_type")


def ranks_of(comm: MPI.Intracomm, transport: Transport) -> list[int]:
    """Return a communicator's ranks as ranks of a transport. A collective on the transport.

    Ranks may pass different communicators, such as MPI's Split returns.
    """
    from mpi4py import MPI

    mpi_ranks = transport.gather_object(MPI.COMM_WORLD.rank)
    places = {number: rank for rank, number in enumerate(mpi_ranks)}
    numbers = range(comm.size)
    translated = MPI.Group.Translate_ranks(comm.group, list(numbers), MPI.COMM_WORLD.group)
    return sorted(places[rank] for rank in translated)


_LAYERED: Final = ("nccl", "staged")


def join(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    *,
    over: str | None = None,
    timeout_seconds: float | None = None,
) -> Transport:
    """Return the transport of the ranks that were launched with this one.

    comm: an mpi4py communicator of the ranks to join, or a list of launched ranks that join.
    over, timeout_seconds: override GTOPK_TRANSPORT and GTOPK_TIMEOUT.
    Raises ValueError for an invalid comm, ImportError if the transport lacks a package,
    RuntimeError if the launcher's variables are not sufficient, PeerTimeoutError (or, inside MPI's
    start, ends the process) if a rank is missing, PeerError (or ends the process) if the launcher
    is gone. Ends the process if a rank that was started on this host has ended.
    """
    timeouts = _timeouts_seconds()
    if timeout_seconds is not None:
        timeouts = timeout_seconds, timeouts[1]
    # Before opening any socket, which would get the number of a closed stream.
    occupy_closed_descriptors()
    require_sound_ranks()
    ranks = comm if is_communicator(comm) else _ranks(comm)
    job = launched_by()
    if over is None:
        over = settings.TRANSPORT.read()
    if over not in _LAYERED:
        return _join(ranks, job, transport_for(job, over), timeouts)
    bootstrap = _join(ranks, job, transport_for(job, ""), timeouts)
    return open_transport(over, *timeouts, bootstrap=bootstrap)


def missing_ranks_warning(size: int) -> str | None:
    """Return, on rank 0, a warning if fewer ranks have joined than were launched; else None.

    size: the size of the world that this rank has joined.
    Raises RuntimeError on every rank if each rank is alone, since each would train its own model.
    GTOPK_TRANSPORT=local allows that.
    """
    job = launched_by()
    if job is None or job.size <= size:
        return None
    requested = settings.TRANSPORT.read()
    who, advice = "gtopk has made", "`gtopk doctor` checks whether launcher and MPI match"
    if requested:
        who = f"GTOPK_TRANSPORT={requested} makes"
        advice = "unset GTOPK_TRANSPORT to train one model together"
    if requested == "mpi":
        advice += f", or start the ranks with: mpirun -n {job.size} python ..."
    warning = (
        f"{who} a world of {size} in each of the {job.size} processes that {job.launcher} has "
        f"started ({job.variables[1]}={job.size}): each trains its own model; {advice}"
    )
    if size == 1 and requested != "local":
        raise RuntimeError(warning)
    return warning if job.rank == 0 else None


def join_over(name: str) -> Transport:
    """Return the named transport, regardless of launcher and environment."""
    return open_transport(name, *_timeouts_seconds())


def _join(comm: Any, job: Launched | None, name: str, timeouts: tuple[float, float]) -> Transport:
    if name == "mpi" or is_communicator(comm):
        with _watchdog(job, timeouts[1], all_join=comm is None, holds_lock=True):
            return _join_mpi(comm, timeouts[0])
    if name == "torch.distributed" and (job or comm):
        # No watchdog limit: torch's store has its own timeout, unlike MPI's start.
        # The script's own process group may contain only some of the launched ranks.
        with _watchdog(job, all_join=not comm and not _has_process_group()):
            return _join_torch(job, comm, *timeouts)
    # This process is alone, so a list can only contain rank 0.
    if comm:
        _check(comm, 0, 1)
    return open_transport(name, *timeouts)


def _ranks(comm: object) -> list[int] | None:
    """Return the ranks that `comm` lists; None for all ranks."""
    if comm is None:
        return None
    numbers: list[Any] = list(comm) if isinstance(comm, Iterable) else [None]
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(
            f"comm must be an mpi4py communicator, a list of ranks or None, got {comm!r}"
        )
    return numbers or None


def _check(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raise ValueError if ranks are out of range, or this one is not listed."""
    if len(set(ranks)) != len(ranks) or not all(0 <= number < size for number in ranks):
        raise ValueError(f"comm must be distinct ranks of 0..{size - 1}, got {list(ranks)}")
    if rank not in ranks:
        raise ValueError(
            f"comm={list(ranks)} lacks rank {rank}, which called init(); every rank must pass the "
            "ranks of its own world"
        )


def transport_for(job: Launched | None, requested: str) -> str:
    """Return the name of the transport for a job's ranks; job None: a single rank."""
    if requested and requested not in TRANSPORTS:
        raise ValueError(f"GTOPK_TRANSPORT must be one of {TRANSPORTS}, got {requested!r}")
    if job is None and not requested and _has_process_group():
        return "torch.distributed"
    return requested or launcher_transport(job)


def _has_process_group() -> bool:
    """Tell whether this program has created a torch.distributed process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _join_mpi(comm: Any, timeout_seconds: float) -> Transport:
    if comm is None:
        return open_transport("mpi", timeout_seconds)
    from collectives.transports.direct import open_mpi

    if not is_communicator(comm):
        from mpi4py import MPI

        _check(comm, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        # Create is a collective of all ranks; Create_group only of the group.
        comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(comm))
    return open_mpi(comm, timeout_seconds)


def _watchdog(
    job: Launched | None,
    seconds: float = math.inf,
    *,
    all_join: bool,
    holds_lock: bool = False,
) -> AbstractContextManager[None]:
    """Return a context in which a watchdog ends this process if joining cannot succeed.

    That is when the launcher has ended, when MPI's start takes longer than `seconds`, or, if all
    ranks join, when a rank that the launcher started on this host has ended. Later, companions
    watch the launcher. Raises PeerError if the launcher is already gone.
    """
    who = f"rank {job.rank} of {job.size}" if job else f"process {os.getpid()}"
    process = f"{who} ({own_place()})"
    launcher_name = job.launcher if job else "the launcher"
    orphaned = f"{process} cannot join the others: {launcher_name}, which started it, is gone"
    if launcher_has_ended():
        raise PeerError(orphaned)
    siblings = None
    if job and all_join and (here := ranks_here(job)):
        ended = (
            f"{process} cannot join the others: of the ranks that {launcher_name} started on this "
            "host, {} before hvd.init()"
        )
        siblings = Siblings(ended, job.variables[0], job.rank, here, is_all=here == job.size)
    late = (
        f"{who} has waited {seconds:g} s (GTOPK_START_TIMEOUT) in MPI's start and ends: "
        "another rank has not called hvd.init() yet, has ended, or cannot be reached; if it only "
        "takes long, set a larger GTOPK_START_TIMEOUT (seconds)"
    )
    file, record = "", {}
    if job and (folder := guard.folder_from()):
        file = os.path.abspath(guard.path_of(folder, job.rank))
        record = guard.record_of(job.rank, job.size)
    return deadline(
        WatchdogSettings(seconds, late, launcher(), orphaned, siblings, file, record),
        holds_lock=holds_lock,
    )


def _join_torch(
    job: Launched | None,
    ranks: Sequence[int] | None,
    timeout_seconds: float,
    start_timeout_seconds: float,
) -> Transport:
    from collectives.transports.torch_distributed import join_at, open_torch_distributed

    if ranks and job:
        _check(ranks, job.rank, job.size)
    elif ranks:
        _check(ranks, torch.distributed.get_rank(), torch.distributed.get_world_size())
    # A process group, torchrun, or another launcher that sets torchrun's variables.
    if job is None or (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
        return open_torch_distributed(timeout_seconds, start_timeout_seconds, ranks)
    store = _open_store(job, start_timeout_seconds)
    return join_at(store, job.rank, job.size, timeout_seconds, start_timeout_seconds, ranks)


def _open_store(job: Launched, start_timeout_seconds: float) -> TCPStore:
    """Return the rendezvous store; rank 0 serves it."""
    from collectives.transports.rendezvous import connect

    address = master()
    server = horovodrun_server()
    if address is None and server is not None:
        if job.rank == 0:
            # Port 0: the system chooses a free one, which the server then publishes.
            host = address_towards(*server.address)
            store = connect(host, 0, 0, start_timeout_seconds)
            server.publish(Address(host, store.port), start_timeout_seconds)
            return store
        address = server.fetch(job.rank, start_timeout_seconds)
    elif address is None and job.launcher == "srun":
        address = srun_address()
    if address is None:
        raise RuntimeError(
            f"{job.launcher} started this process as rank {job.rank} of {job.size} and sets no "
            "rendezvous address: set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a "
            f"free port there, or start the ranks with: mpirun -n {job.size} python ..."
        )
    return connect(*address, job.rank, start_timeout_seconds)


def _timeouts_seconds() -> tuple[float, float]:
    """Return how long a rank waits for a peer in an operation, and for all ranks at the start."""
    return settings.TIMEOUT.read(), settings.START_TIMEOUT.read()
