"""The world: this process's one transport, its engine, and where the rank sits."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from collectives.errors import PeerTimeoutError
from collectives.transports import Transport
from collectives.transports.transport import CHANNELS, say

from .. import __version__, logs, settings, standard_streams
from ..engine import Engine
from ..engine.agreement import name_ranks
from ..engine.clocks import Offset, agree_on_now, clock_offset
from ..engine.members import Members
from ..errors import HorovodInternalError, InvalidCallError
from ..launch import Launched, launched_by, require_sound_ranks
from ..recording import start as recording
from ..recording.recorder import Recorder
from ..recording.settings import Settings, settings_from
from ..timeline import timeline
from . import checked_messages, failure_file
from .gpu_messages import gpus_in_sight, over_gpus
from .guard import Guard, describe
from .joining import join, left_apart
from .leaving import Leaving
from .unfinished import Unfinished

if TYPE_CHECKING:
    from mpi4py import MPI


_log = logging.getLogger("gtopk")
_FAILED_SECONDS: Final = 2.0  # what the others get to leave, too, where init() has failed
_MOMENT_SECONDS: Final = 5.0


class World:
    """A rank's view of all ranks.

    step:       how many optimizer steps this rank has finished; errors name it.
    timeline:   what records its operations, while something does.
    recorder:   what records its steps, while something does.
    recordings: what was asked to be recorded, by the environment or the script.
    recorded_to: the folders that it was recorded to so far.
    resumed:    whether it went on from a run before it.
    clock:      how far this rank's clock is ahead of rank 0's; known where something is recorded.
    began_unix_seconds: by rank 0's calendar, the same on every rank; known where clock is.
    advice:     how the job can go on when it ends before its time; errors end with it.
    advised:    whether it was said what compression saves.
    termination_requested: whether this rank had SIGTERM.
    preempted:  the ranks that had it, as all ranks know after the same step. See `preemption`.
    optimizers: how many distributed optimizers it has made, by the name of a parameter.
    sets:       the process sets by their number; 0 is all ranks. A new world numbers them, and
                their operations without a name, anew: where ranks left the last one at different
                operations, they agree again.
    sets_made:  how many sets were made besides, those that were refused or removed included.
    is_homogeneous: whether every node has as many ranks.
    unfinished: what all ranks have under way, to be finished before they leave.
    failures:   of that, what went wrong; known once this rank has left.
    """

    def __init__(self, transport: Transport, recordings: Settings | None = None) -> None:
        """recordings: those of the world before; None: what the environment asks for."""
        self.rank, self.size = transport.rank, transport.size
        self.on_change: Callable[[], None] = lambda: None  # of step or advice
        self._step = 0
        self._advice = ""
        self.timeline: timeline.Timeline | None = None
        self.recorder: Recorder | None = None
        self.recordings = settings_from() if recordings is None else recordings
        self.recorded_to: set[str] = set()
        self.resumed = False
        self.advised = False
        self.termination_requested = False
        self.preempted: list[int] = []
        self.optimizers: Counter[str] = Counter()
        node = transport.neighbours()
        self.local_rank, self.local_size = node.index(self.rank), len(node)
        places = transport.gather_object([node[0], self.local_rank, gpus_in_sight()])
        self.is_homogeneous = len(set(Counter(first for first, *_ in places).values())) == 1
        # The nodes that have a process with this local rank, in order of their first rank.
        nodes = sorted(first for first, local_rank, _ in places if local_rank == self.local_rank)
        self.cross_rank, self.cross_size = nodes.index(node[0]), len(nodes)
        transport = self.transport = over_gpus(transport, [in_sight for *_, in_sight in places])
        checks_messages = checked_messages.wanted_on(transport)

        def meet(transport: Transport, all_flags: Sequence[int]) -> tuple[Offset, float]:
            if checks_messages:  # all ranks alike: what they said of it was compared
                transport.check_messages()
            if not any(all_flags):
                return Offset(), 0.0
            return clock_offset(transport), agree_on_now(transport)

        self.unfinished: list[Unfinished] = []
        self.failures: list[Exception] = []
        self._endings: list[Callable[[], None]] = []
        self.engine = Engine(transport)
        self.engine.finishes_later = self._finishes_later
        self.sets = {0: Members(range(self.size), self.engine)}
        self.sets_made = 0
        self.carried: set[int] = set()  # sets of the world before, which nobody has added again
        # Ranks of different versions may differ in anything: refuse them before they do.
        recorded = self.recordings.asked or timeline.is_of_every_rank()
        self.clock: Offset
        self.began_unix_seconds: float
        init = self.engine.submit(
            "init",
            [f"gtopk {__version__}", f"{settings.CHECK_MESSAGES.name}={checks_messages:d}"],
            meet,
            flags=recorded,
        )
        try:
            self.clock, self.began_unix_seconds = init.wait()
        except HorovodInternalError:
            # There is no world to leave later, and threads of the transport at the program's end
            # would abort it.
            self.engine.close("its init() failed", _FAILED_SECONDS)
            raise
        self.engine.where = self.where

    def where(self) -> str:
        """Return at which step this rank is, in the words of errors."""
        return f"at step {self.step}"

    def name_optimizer(self, names: Iterable[str], ranks: Sequence[int] | None = None) -> str:
        """Return a name for an optimizer of parameters with these names.

        Optimizers of the same names are numbered, in the order in which they come; those of some
        ranks (None: of all) by themselves, as the others may not have them.
        """
        first = min(names)
        if ranks is not None and len(ranks) < self.size:
            first += f".of.{'.'.join(map(str, ranks))}"
        self.optimizers[first] += 1
        number = self.optimizers[first]
        return first if number == 1 else f"{first}.{number}"

    def open_set(self, number: int, ranks: Sequence[int]) -> None:
        """Give some of the ranks operations of their own; every rank calls it, nothing is sent."""
        engine = None
        if self.rank in ranks:
            # A stream of their own: a set is independent of whatever else the same ranks do.
            engine = Engine(self.transport.subset(ranks).channel(number % CHANNELS))
            engine.where = self.where
        self.sets[number] = Members(tuple(ranks), engine)
        timeline.watch(self, number)

    def reopen_sets(self, sets: Mapping[int, Members], made: int) -> None:
        """Open the sets of the world before, under the same numbers; every rank calls it.

        made: how many were made there. A set that not every rank has, as what failed was to add or
        to remove it, is forgotten.
        """

        def compare(transport: Transport, all_flags: Sequence[int]) -> tuple[int, list[int]]:
            said = transport.gather_object([made, *sets])
            numbers = set(sets).intersection(*(numbers for _, *numbers in said))
            return max(made for made, *_ in said), sorted(numbers - {0})

        self.sets_made, numbers = self.engine.submit("process sets", [], compare).wait()
        for number in numbers:
            self.open_set(number, sets[number].ranks)
        self.carried = set(numbers)

    def close_set(self, number: int, reason: str) -> None:
        """Run what the set's members have submitted, and forget the set."""
        engine = self.sets.pop(number).engine
        if engine is not None:
            engine.close(reason)

    def close(self, reason: str, in_order: bool = True) -> None:
        """Leave the world, and have the record say how."""
        self.leave(reason)
        if self.failures:
            reason, in_order = f"{reason}; unfinished then: {self.failures[0]}", False
        recording.stop(self, reason, in_order)

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        """Leave the world; returns when every rank has left, or the job is at its end anyway.

        What was unfinished is finished first; `failures` has what of it went wrong.
        leave_timeout_seconds: how long to wait for the others instead; returns who stays.
        """
        self._begin_to_finish()
        for number in [number for number in self.sets if number]:
            self.close_set(number, reason)
        staying = self.engine.close(reason, leave_timeout_seconds)
        timeline.stop(self)
        for end in self._endings:
            try:
                end()
            except Exception as error:  # of any kind: to be told once the rank has left
                self.failures.append(error)
        return staying

    def _begin_to_finish(self) -> None:
        unfinished, self.unfinished = self.unfinished, []
        self._endings += [each.begin(self.engine) for each in unfinished]

    def _finishes_later(self) -> bool:
        if not all(each.is_ready() for each in self.unfinished):
            return True
        self._begin_to_finish()
        return False

    @property
    def step(self) -> int:
        """How many optimizer steps this rank has made."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.on_change()

    @property
    def advice(self) -> str:
        """How the job can go on when it ends before its time."""
        return self._advice

    @advice.setter
    def advice(self, advice: str) -> None:
        self._advice = advice
        self.on_change()

    def resume(self, step: int) -> None:
        """Go on from this step of a run that was before this world."""
        self.step, self.resumed = step, True
        if self.recorder is not None:
            self.recorder.note_resumed()

    def note_preempted(self, ranks: Sequence[int]) -> None:
        """Note the ranks that are preempted, as all ranks do in the same step."""
        self.preempted = sorted({*self.preempted, *ranks})

    def note_end(self, how: str, in_order: bool) -> None:
        """Have the record say how this rank ends, before it does."""
        if self.recorder is not None:
            self.recorder.end(how, in_order)


_process: World | None = None
_communicator: MPI.Intracomm | Sequence[int] | None = None  # that `init` was given
_guard: Guard | None = None
# What marks the exception that was handled while `init` was called: no reason to end the job. Held
# itself, it would keep all that its frames hold.
_handled: object = None
_MARK: Final = "_gtopk_handled"
_leaving: Leaving | None = None  # of the last world
_bereft: Guard | None = None  # of a world that was left, and that a rank had died in that might
_forked_from: int | None = None
_untold: list[Exception] = []  # what went wrong as this rank left, and no caller has heard of
_of_thread = threading.local()


def init(comm: MPI.Intracomm | Sequence[int] | None = None) -> None:
    """Join the world that a launcher started, or be a world of one.

    comm: an mpi4py communicator to use in place of MPI.COMM_WORLD, or the ranks, of those that the
        launcher started, that are the world; only they call this. Over MPI the others must start
        it, too (`import mpi4py.MPI`): it begins on all or none. Without torchrun and a process
        group, rank 0 of those launched must be among them: the others meet at it.
    Works under mpirun, torchrun, horovodrun and srun; see `joining`. Calling it again does nothing
    until `shutdown`. Raises ImportError when a package is missing, RuntimeError when the launcher
    does not say enough, a rank does not come or the transport leaves each of them alone, ValueError
    for another comm.
    """
    if _process is None:
        _init(comm)


def _init(comm: MPI.Intracomm | Sequence[int] | None, recordings: Settings | None = None) -> None:
    global _communicator
    finish_leaving()
    require_sound_ranks()
    transport = _join(comm, launched_by(), failure_file.folder_from())
    amiss = left_apart(transport.size) if comm is None else None
    init_on(transport, recordings)
    _communicator = comm
    if amiss is not None:
        _log.warning(amiss)


def _join(
    comm: MPI.Intracomm | Sequence[int] | None, job: Launched | None, failures: str
) -> Transport:
    """Return what `join` does; write down, in the folder of failure files, what it raises."""
    if job is None or not failures:
        return join(comm)
    failure_file.remove_earlier(failures, job.rank, job.size)
    try:
        return join(comm)
    except Exception as error:
        failure_file.write_of_start(failures, job.rank, job.size, error)
        raise


def init_on(transport: Transport, recordings: Settings | None = None) -> None:
    """Make a transport the world of this process, until `shutdown`; recordings: as of World."""
    global _process, _guard, _handled
    heartbeat_seconds = settings.HEARTBEAT_TIMEOUT.read()
    failures = failure_file.folder_from()
    failure_file.remove_earlier(failures, transport.rank, transport.size)
    logs.speak(transport.rank)
    here = World(transport, recordings)
    guard = Guard(here, heartbeat_seconds, failures)
    try:
        guard.install()
    except BaseException:
        here.engine.close("its init() failed", _FAILED_SECONDS)
        guard.remove()
        raise
    _process, _guard = here, guard
    _handled = object()
    if (error := sys.exc_info()[1]) is not None:
        with suppress(AttributeError):
            setattr(error, _MARK, _handled)
    timeline.start_if_asked(_process)
    recording.start_if_asked(_process)
    atexit.register(_at_exit)


def shutdown() -> None:
    """Leave the world; operations that other ranks begin afterwards fail on them.

    Returns when every rank has called it, or has ended its program. While an exception is handled
    that was raised after `init`, it returns at once: where the exception ends the program, it ends
    the job; else this rank leaves a moment later, and waits for the others when its program ends.
    Raises what went wrong with what all ranks had under way, such as a CheckpointError.
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
        _let_the_program_end(_guard)
    else:
        _leaving = Leaving(partial(_process.close, how, in_order), _guard)
    logs.fall_silent()
    _process = _guard = _handled = None
    for failure in failures:
        raise failure


def finish_leaving() -> None:
    """Wait for the others where this rank is still leaving the last world."""
    global _leaving
    if _leaving is not None:
        _leaving.finish()
        _untold.extend(_leaving.guard.member.failures)
        _let_the_program_end(_leaving.guard)
        _leaving = None


def misses_a_rank() -> bool:
    """Tell whether a rank is lost, so that the job is at its end."""
    return _guard is not None and _guard.misses_a_rank()


def rejoin() -> None:
    """Leave the world and join it anew, as every rank of it must, whatever failed on some of them.

    Process sets stay registered.
    Ranks that compute meanwhile are waited for as long as a rank waits in an operation.
    Raises HorovodInternalError when a rank has died or stays silent: the job is at its end.
    """
    global _process, _guard
    here, guard = current(), _guard
    if guard is None:
        raise ValueError("a world of threads cannot be joined anew")
    # Who has been silent for that long already is given a moment.
    silent = isinstance(here.engine.failure, PeerTimeoutError)
    leave_timeout_seconds = _MOMENT_SECONDS if silent else here.transport.timeout_seconds
    sets = here.sets.copy()
    staying = here.leave(guard.departure_notice("begins anew"), leave_timeout_seconds)
    if gone := sorted({*staying, *here.transport.lost()}):
        failure = here.engine.failure
        raise HorovodInternalError(
            f"{name_ranks(gone)} cannot join this job anew"
            + (f" ({failure})" if failure else "")
            + (f"; {here.advice}" if here.advice else "")
        )
    for lost in here.failures:
        _log.error("%s", lost)
    recording.pause(here)
    guard.remove()
    atexit.unregister(_at_exit)
    _process = _guard = None
    _init(_communicator, here.recordings)
    current().reopen_sets(sets, here.sets_made)
    current().resume(here.step)
    current().advice = here.advice
    current().termination_requested = here.termination_requested
    current().preempted = here.preempted


def _let_the_program_end(guard: Guard) -> None:
    """Have the program end as if there had been no world, where MPI can end with it."""
    global _bereft
    if _lacks_a_rank(guard):
        _bereft = guard
    else:
        atexit.unregister(_at_exit)


def _lacks_a_rank(guard: Guard) -> bool:
    """Tell whether a rank has died that might, which MPI's own end would wait for."""
    return guard.member.engine.ranks_may_leave and bool(guard.member.transport.lost())


def _at_exit() -> None:
    guard = _guard or _bereft
    if _leaving is not None:
        guard = _leaving.guard
        _leaving.finish()
    elif _process is not None and guard is not None:
        error = _what_ended_the_program()
        by = "" if error is None else f" by {describe(error)}"
        _process.close(guard.departure_notice(f"its program ended{by}"), in_order=error is None)
        guard.close()
    if guard is not None:
        _untold.extend(guard.member.failures)
    if _untold:
        return
    if guard is not None and _lacks_a_rank(guard) and guard.member.transport.name == "mpi":
        _end_without_mpi()


def _end_without_mpi() -> None:
    """End this process, with exit code 1 where an exception has ended its program."""
    standard_streams.flush()
    os._exit(int(_what_ended_the_program() is not None))


def _what_ended_the_program() -> BaseException | None:
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def _end_by_what_went_wrong() -> None:
    """Say what nobody was told, and end with exit code 1, which Python would not."""
    if not _untold:
        return
    for failure in _untold:
        say(f"exit code 1, not 0: {describe(failure)}")
    standard_streams.flush()
    os._exit(1)


# Before what a script registers: it runs after that.
atexit.register(_end_by_what_went_wrong)


def is_initialized() -> bool:
    """Tell whether `init` has been called, and `shutdown` has not."""
    return _find() is not None


def current() -> World:
    """Return the world; raise InvalidCallError before `init` and after `shutdown`."""
    world = _find()
    if world is None and _forked_from is not None:
        raise InvalidCallError(
            f"this process was forked from rank {_forked_from}: only the rank itself communicates"
        )
    if world is None:
        raise InvalidCallError(
            "gtopk has not been initialized: call hvd.init() first (import gtopk.torch as hvd)"
        )
    return world


def _after_fork() -> None:
    """Make a forked child (a DataLoader's worker) no rank: its parent's engine is not in it."""
    global _process, _guard, _leaving, _bereft, _forked_from
    guard = _leaving.guard if _leaving is not None else _guard or _bereft
    if guard is None:
        return
    guard.forget()
    atexit.unregister(_at_exit)
    _untold.clear()
    _forked_from = guard.member.transport.rank
    _process = _guard = _leaving = _bereft = None


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
        for failure in _of_thread.world.failures:
            raise failure
    finally:
        del _of_thread.world
