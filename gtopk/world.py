"""The world: this process's one transport, its engine, and where the rank sits."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from collectives.transports import Transport, open_transport

from . import __version__
from .engine import Engine
from .guard import Guard, describe
from .launch import MPI_SIZE_VARIABLES, Launched, launched_by

if TYPE_CHECKING:
    from mpi4py import MPI

# The longest a rank waits for a peer in an operation, and at the start for all to arrive.
TIMEOUT_SECONDS = {"GTOPK_TIMEOUT": 600.0, "GTOPK_START_TIMEOUT": 120.0}


class World:
    """A rank's view of all ranks.

    step:       how many optimizer steps this rank has finished; errors name it.
    optimizers: how many distributed optimizers it has made; their order names their operations.
    unnamed:    counts the operations without a name. A new world counts anew: where ranks left the
                last one at different operations, they agree again.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.step = 0
        self.optimizers = 0
        self.unnamed = itertools.count(1)
        node = transport.neighbours()
        self.local_rank, self.local_size = node.index(self.rank), len(node)
        places = [
            tuple(message.view(np.int64).tolist())
            for message in transport.allgather(np.array([node[0], self.local_rank]).view(np.uint8))
        ]
        # The nodes that have a process with this local rank, in order of their first rank.
        nodes = sorted(first for first, local_rank in places if local_rank == self.local_rank)
        self.cross_rank, self.cross_size = nodes.index(node[0]), len(nodes)
        self.engine = Engine(transport)
        # Ranks of different versions may differ in anything: refuse them before they do.
        self.engine.submit("init", [f"gtopk {__version__}"], lambda transport, votes: None).wait()

    def close(self, reason: str, failed: bool = False) -> None:
        """Leave the world; returns when every rank has left, or the job is at its end anyway."""
        self.engine.close(reason, failed)


_process: World | None = None
_guard: Guard | None = None
_forked_from: int | None = None
_of_thread = threading.local()


def init(comm: MPI.Intracomm | None = None) -> None:
    """Join the world that a launcher started, or be a world of one.

    comm: an mpi4py communicator to use in place of MPI.COMM_WORLD.
    Under mpirun (or any launcher that speaks PMI or Open MPI's variables) this opens MPI. Calling
    it again does nothing until `shutdown`. Raises ImportError when mpi4py or its MPI library is
    missing, RuntimeError when the launcher is one gtopk cannot join, ValueError for another comm.
    """
    global _process, _guard
    if _process is not None:
        return
    _process = World(_open(comm))
    _guard = Guard(_process)
    _guard.install()
    atexit.register(_at_exit)


def _open(comm: MPI.Intracomm | None) -> Transport:
    timeout_seconds = _seconds("GTOPK_TIMEOUT")
    job = launched_by()
    if comm is None and job is None:
        return open_transport("local", timeout_seconds)
    if comm is None and job is not None and not _speaks_mpi(job):
        if job.size == 1:
            return open_transport("local", timeout_seconds)
        raise RuntimeError(
            f"{job.launcher} started this process as rank {job.rank} of {job.size}, and gtopk "
            f"joins ranks over MPI only; start them with: mpirun -n {job.size} python ..."
        )
    # A rank that ended before it came here would leave the others in MPI's start for ever, where
    # no Python runs: faulthandler's own thread ends this process, and the launcher the job.
    faulthandler.dump_traceback_later(_seconds("GTOPK_START_TIMEOUT"), exit=True, file=2)
    try:
        if comm is None:
            return open_transport("mpi", timeout_seconds)
        from collectives.transports.mpi import MpiTransport

        if not hasattr(comm, "Split_type"):
            raise ValueError(f"comm must be an mpi4py communicator or None, got {comm!r}")
        return MpiTransport(comm, timeout_seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _speaks_mpi(job: Launched) -> bool:
    """Tell whether MPI can find the job's other ranks; srun --mpi=pmix leaves only PMIX_RANK."""
    return job.variables[1] in MPI_SIZE_VARIABLES or "PMIX_RANK" in os.environ


def _seconds(variable: str) -> float:
    """Return the seconds an environment variable asks for, or its default."""
    text = os.environ.get(variable, str(TIMEOUT_SECONDS[variable]))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{variable} must be a number of seconds above 0, got {text!r}")
    return seconds


def shutdown() -> None:
    """Leave the world; operations that other ranks begin afterwards fail on them.

    Returns when every rank has called it, or has ended its program.
    """
    global _process, _guard
    if _process is None:
        return
    assert _guard is not None
    error = sys.exc_info()[1]
    if error is None:
        _process.close(_guard.farewell("called shutdown()"))
    else:  # in a `finally`: the peers must not wait for the traceback to come out
        _guard.tell(error)
        _process.close(_guard.farewell(f"raised {describe(error)}"), failed=True)
    _guard.remove()
    _process = _guard = None
    atexit.unregister(_at_exit)


def _at_exit() -> None:
    if _process is not None and _guard is not None:
        _process.close(_guard.farewell("its program ended"))


def is_initialized() -> bool:
    """Tell whether `init` has been called, and `shutdown` has not."""
    return _find() is not None


def current() -> World:
    """Return the world; raise ValueError before `init` and after `shutdown`."""
    world = _find()
    if world is None and _forked_from is not None:
        raise ValueError(
            f"this process was forked from rank {_forked_from}: only the rank itself communicates"
        )
    if world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return world


def _after_fork() -> None:
    """Make a forked child (a DataLoader's worker) no rank: its parent's engine is not in it."""
    global _process, _guard, _forked_from
    if _process is None:
        return
    assert _guard is not None
    _guard.remove()
    atexit.unregister(_at_exit)
    _forked_from = _process.rank
    _process = _guard = None


os.register_at_fork(after_in_child=_after_fork)


def _find() -> World | None:
    return getattr(_of_thread, "world", None) or _process


@contextmanager
def entered(transport: Transport) -> Iterator[World]:
    """Make a transport this thread's world: several ranks in one process, each in a thread."""
    _of_thread.world = World(transport)
    try:
        yield _of_thread.world
    except BaseException as error:
        _of_thread.world.engine.close(f"it raised {type(error).__name__}: {error}")
        raise
    else:
        _of_thread.world.close("its program ended")
    finally:
        del _of_thread.world
