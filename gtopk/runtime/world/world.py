"""This process's world: joined with `init`, left with `shutdown` or when the program ends.

If `shutdown` is called while an exception is handled, it is not known yet whether the exception
will end the program. From a `finally` the exception propagates, and the guard ends the job; from an
`except` the program continues. So the rank leaves a moment later (`Leaving`).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Final

from collectives.errors import PeerTimeoutError
from collectives.kernels import why_not_compiled
from collectives.transports import Transport
from collectives.transports.transport import end_process, print_line

from ... import settings
from ...errors import HorovodInternalError, InvalidCallError
from .. import logs
from ..coordinator.agreement import name_ranks
from ..coordinator.execution import settings_from
from ..launch import Launched, launched_by, require_sound_ranks
from ..launch.job import mark_joined, require_own_rank, torchrun_agent
from ..liveness.heartbeat import Heartbeat
from .guard import (
    Guard,
    call_after_fork,
    describe,
    folder_from,
    is_needed,
    remove_earlier,
    write,
)
from .joining import join, missing_ranks_warning
from .membership import FAILED_SECONDS, World

if TYPE_CHECKING:
    from mpi4py import MPI


_EXCEPTION_SECONDS: Final = 1.0  # for an exception to end the program before the rank leaves


class Leaving:
    """Leaves the world after 1 s, or at `finish`, while the program continues.

    close: leaves without a failure; returns when every rank has left.
    guard: stays active until then, to end the job if the exception ends the program.
    """

    def __init__(self, close: Callable[[], object], guard: Guard) -> None:
        self.guard = guard
        self._close = close
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._leave, name="gtopk-leaving", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Leave now; return when every rank has left."""
        self._now.set()
        self._thread.join()
        self.guard.remove()  # again: the thread could not restore SIGTERM's handler

    def _leave(self) -> None:
        self._now.wait(_EXCEPTION_SECONDS)
        self._close()
        self.guard.remove()


_log = logging.getLogger("gtopk")
_SHORT_TIMEOUT_SECONDS: Final = 5.0


_process: World | None = None
_communicator: MPI.Intracomm | Sequence[int] | None = None  # init's argument
_guard: Guard | None = None
# Marks the exception that was being handled when `init` was called, which must not end the job. A
# reference to the exception itself would keep its frames' variables alive.
_handled: object = None
_MARK: Final = "_gtopk_handled"
_leaving: Leaving | None = None  # for the last world
_left_guard: Guard | None = None  # of a left world where ranks may leave, and one had died
_inherited: World | None = None  # in a forked process: the world of its parent, which is a rank
_finalizer: Finalize | None = None  # in a child of multiprocessing
_unreported: list[Exception] = []  # errors from leaving that no caller has received
_thread_local = threading.local()


def init(comm: MPI.Intracomm | Sequence[int] | None = None) -> None:
    """Join the world that a launcher started, or be a world of one.

    comm: an mpi4py communicator to use instead of MPI.COMM_WORLD, or a list of the launched ranks
        that form the world; only they call this. With MPI, the other ranks must start MPI as well
        (`import mpi4py.MPI`): it starts on all ranks or none. Without torchrun and a process group,
        the list must include launched rank 0, which serves the rendezvous.
    Works under mpirun, torchrun, horovodrun and srun; see `joining`. Calling it again does nothing
    until `shutdown`. Raises ImportError if a package is missing, RuntimeError if the launcher's
    variables are not sufficient, a rank does not come, the transport leaves each rank alone or the
    program is exiting, ValueError for an invalid comm or setting.
    """
    if _process is None:
        _init(comm)


def _init(comm: MPI.Intracomm | Sequence[int] | None, previous: World | None = None) -> None:
    global _communicator
    # Only in exit handlers. Python may end the engine's thread at any time there, inside C++ code.
    if not threading.current_thread().is_alive():
        raise RuntimeError(
            "gtopk cannot start while the program exits: hvd.init() was called by an exit handler "
            "(atexit); call it before the program ends"
        )
    finish_leaving()
    require_sound_ranks()
    job = launched_by()
    if job is not None:
        require_own_rank(job)
    transport = _join(comm, job, folder_from())
    warning = missing_ranks_warning(transport.size) if comm is None else None
    init_on(transport, previous)
    if job is not None:
        mark_joined(job)
    _communicator = comm
    if warning is not None:
        _log.warning(warning)


def _join(
    comm: MPI.Intracomm | Sequence[int] | None, job: Launched | None, failures: str
) -> Transport:
    """Return the transport from `join`; write a failure file if it raises."""
    if job is None or not failures:
        return join(comm)
    remove_earlier(failures, job.rank, job.size)
    try:
        return join(comm)
    except Exception as error:
        write(failures, job.rank, job.size, error)
        raise


def init_on(transport: Transport, previous: World | None = None) -> None:
    """Make a transport this process's world, until `shutdown`; previous: as in World."""
    global _process, _guard, _handled, _finalizer, _inherited
    failures = folder_from()
    remove_earlier(failures, transport.rank, transport.size)
    heartbeat = None
    try:
        # All settings now, not within an operation. The others have joined, and get the error.
        settings.check_all()
        heartbeat_seconds = settings.HEARTBEAT_TIMEOUT.read()
        logs.install_handler(transport.rank)
        if transport.rank == 0 and transport.size > 1:
            _warn_of_slow_kernels()
        if heartbeat_seconds > 0 and is_needed(transport):
            warning_seconds = settings_from().stall_warning_seconds
            # Before the ranks meet: their one message then carries its introduction.
            # No launcher pid for Open MPI, which ends its ranks itself.
            launcher = torchrun_agent()
            heartbeat = Heartbeat(transport, heartbeat_seconds, warning_seconds, launcher)
        introduction = None if heartbeat is None else heartbeat.introduction
        # Compared even if the heartbeat is off here: it may be on elsewhere.
        signature = [f"{settings.HEARTBEAT_TIMEOUT.name}={heartbeat_seconds:g}"]
        here = World(transport, previous, signature, introduction)
    except BaseException as init_error:
        # The others have met this rank, and would wait for it until the timeout.
        transport.leave("its init() failed", FAILED_SECONDS)
        logs.remove_handler()
        if heartbeat is not None:
            heartbeat.close()
        if failures and isinstance(init_error, Exception):
            write(failures, transport.rank, transport.size, init_error)
        raise
    guard = Guard(here, heartbeat, failures)
    try:
        guard.install()
    except BaseException:
        here.engine.close("its init() failed", FAILED_SECONDS)
        guard.remove()
        raise
    # Only now: a failed init() leaves no world behind.
    _process, _guard, _inherited = here, guard, None
    _handled = object()
    if (error := sys.exc_info()[1]) is not None:
        with suppress(AttributeError):
            setattr(error, _MARK, _handled)
    here.observe()
    atexit.register(_at_exit)
    # Such a child calls no exception hook and, if forked, no exit handlers: the others would only
    # hear that it has ended.
    is_child = multiprocessing.parent_process() is not None
    if is_child and not (_finalizer and _finalizer.still_active()):
        _finalizer = Finalize(None, _end_of_child, exitpriority=0)


def _warn_of_slow_kernels() -> None:
    """Log which kernels run if they are not the compiled ones."""
    if reason := why_not_compiled():
        _log.warning(
            "using the NumPy kernels, which are slower than the C++ core: %s; `gtopk doctor` says "
            "how to build it",
            reason,
        )


def shutdown() -> None:
    """Leave the world; operations that other ranks begin afterwards fail on them.

    Returns when every rank has called it, or has ended its program. While an exception raised after
    `init` is being handled, it returns at once: if that exception ends the program, it ends the
    job; else this rank leaves a moment later, and waits for the others when its program ends.
    Raises the error of unfinished work of all ranks, such as a CheckpointError.
    """
    global _process, _guard, _handled, _leaving
    if _process is None:
        return
    assert _guard is not None
    failures: list[Exception] = []
    error = sys.exc_info()[1]
    if getattr(error, _MARK, None) is _handled:
        error = None
    how, in_order = "called shutdown()", error is None or isinstance(error, SystemExit)
    if error is not None:
        how += f" while it handled {describe(error, _process.where())}"
    how = _guard.departure_notice(how)
    if error is None or not _guard.needed:
        _process.close(how, in_order)
        failures = _process.failures
        _guard.remove()
        _remove_exit_handler(_guard)
    else:
        _leaving = Leaving(partial(_process.close, how, in_order), _guard)
    logs.remove_handler()
    settings.JOINED.take()
    _process = _guard = _handled = None
    # Only now: whatever failed, the world has been left.
    for failure in failures:
        raise failure


def finish_leaving() -> None:
    """Wait for the others if this rank is still leaving the last world."""
    global _leaving
    if _leaving is not None:
        _leaving.finish()
        _unreported.extend(_leaving.guard.world.failures)
        _remove_exit_handler(_leaving.guard)
        _leaving = None


def has_lost_rank() -> bool:
    """Tell whether a rank is lost, so that the job must end."""
    return _guard is not None and _guard.has_lost_rank()


def rejoin() -> None:
    """Leave the world and join it again. Every rank must call it, including those without failure.

    Process sets stay registered.
    Ranks that still compute get the same timeout as in an operation.
    Raises HorovodInternalError if a rank has died or stays silent: the job must end.
    """
    global _process, _guard
    here, guard = current(), _guard
    if guard is None:
        raise ValueError("a world of threads cannot rejoin")
    # A rank that was already silent for that long gets only 5 s more.
    silent = isinstance(here.engine.failure, PeerTimeoutError)
    leave_timeout_seconds = _SHORT_TIMEOUT_SECONDS if silent else here.transport.timeout_seconds
    # A copy, as leaving closes and forgets the sets.
    sets = here.sets.copy()
    remaining = here.leave(guard.departure_notice("rejoins"), leave_timeout_seconds)
    if lost := sorted({*remaining, *here.transport.lost()}):
        failure = here.engine.failure
        raise HorovodInternalError(
            f"{name_ranks(lost)} cannot rejoin this job"
            + (f" ({failure})" if failure else "")
            + (f"; {here.advice}" if here.advice else "")
        )
    for unfinished in here.failures:
        _log.error("%s", unfinished)
    here.pause()
    guard.remove()
    atexit.unregister(_at_exit)
    _process = _guard = None
    try:
        _init(_communicator, here)
    except BaseException as error:
        here.note_end(f"could not rejoin: {describe(error)}", in_order=False)
        raise
    current().reopen_sets(sets, here.sets_made)
    current().resume(here.step)
    current().advice = here.advice
    # Combine, as SIGTERM may have come since the new world was made.
    current().termination_requested |= here.termination_requested
    current().preempted = here.preempted


def _remove_exit_handler(guard: Guard) -> None:
    """Remove the exit handler of a left world, unless MPI could not end after it."""
    global _left_guard
    if _has_dead_rank(guard):
        _left_guard = guard
    else:
        atexit.unregister(_at_exit)


def _has_dead_rank(guard: Guard) -> bool:
    """Tell whether a rank has died where ranks may leave; MPI_Finalize would wait for it."""
    return guard.world.engine.ranks_may_leave and bool(guard.world.transport.lost())


def _at_exit() -> None:
    guard = _guard or _left_guard
    if _leaving is not None:
        guard = _leaving.guard
        _leaving.finish()
    elif _process is not None and guard is not None:
        error = _uncaught_exception()
        by = "" if error is None else f" by {describe(error)}"
        _process.close(guard.departure_notice(f"its program ended{by}"), in_order=error is None)
        guard.close()
    if guard is not None:
        _unreported.extend(guard.world.failures)
    if _unreported:
        return
    if guard is not None and _has_dead_rank(guard) and guard.world.transport.name == "mpi":
        end_process(int(_uncaught_exception() is not None))


def _end_of_child() -> None:
    """Leave the world, or end the job if an exception is ending this child of multiprocessing."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        # torch.multiprocessing.spawn catches the function's exception, and calls sys.exit(1).
        error = error.__context__ if error.code else None
    if error is not None and _guard is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    elif error is None:
        atexit.unregister(_at_exit)
        _at_exit()
        _exit_with_unreported_errors()


def _uncaught_exception() -> BaseException | None:
    # Python sets it once it has printed the exception that ends the program.
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def _exit_with_unreported_errors() -> None:
    """Print errors that no caller has received, and exit with code 1 instead of Python's 0."""
    if not _unreported:
        return
    for failure in _unreported:
        print_line(f"exit code 1, not 0: {describe(failure)}")
    end_process(1)


# Registered before a script's own exit handlers, so that it runs after them.
atexit.register(_exit_with_unreported_errors)


def is_initialized() -> bool:
    """Tell whether `init` has been called, and `shutdown` has not."""
    return _find() is not None


def current() -> World:
    """Return the world; raise InvalidCallError before `init` and after `shutdown`."""
    world = _find()
    if world is None and _inherited is not None:
        raise InvalidCallError(
            f"this process was forked from rank {_inherited.rank}: only the rank itself "
            "communicates"
        )
    if world is None:
        raise InvalidCallError(
            "gtopk has not been initialized: call hvd.init() first (import gtopk.torch as hvd)"
        )
    return world


def find() -> World | None:
    """Return the world for queries, or None: in a forked process, that of its parent's rank."""
    return _find() or _inherited


def queried() -> World:
    """Return the world for queries, as `find`; raise InvalidCallError before `init`."""
    return find() or current()


def _after_fork() -> None:
    """Stop a forked child (a DataLoader worker) being a rank: it has no engine thread."""
    global _process, _guard, _leaving, _left_guard, _inherited
    guard = _leaving.guard if _leaving is not None else _guard or _left_guard
    if guard is None:
        return
    guard.release_after_fork()
    # Otherwise a forked process would leave the world in its parent's name when it ends.
    atexit.unregister(_at_exit)
    _unreported.clear()
    _inherited = _process
    _process = _guard = _leaving = _left_guard = None


call_after_fork(_after_fork)


def _find() -> World | None:
    # A thread's own world comes first: ranks may be threads of one process.
    return getattr(_thread_local, "world", None) or _process


@contextmanager
def entered(transport: Transport) -> Iterator[World]:
    """Make a transport this thread's world, for several ranks in one process, one per thread."""
    _thread_local.world = World(transport)
    try:
        yield _thread_local.world
    except BaseException as error:
        _thread_local.world.engine.close(f"it raised {type(error).__name__}: {error}")
        raise
    else:
        _thread_local.world.close("its program ended")
        for failure in _thread_local.world.failures:
            raise failure
    finally:
        del _thread_local.world
