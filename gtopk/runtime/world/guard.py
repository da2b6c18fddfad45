"""Guard: when one rank fails, end the job with an error that names the rank and its step.

an exception (any thread)   print it with rank and step, then abort the job
the program ends, or calls sys.exit, while its peers go on
                            their next operation fails and names this rank (Engine, Transport)
a signal kills the rank     the launcher ends the others; each prints the step it was stopped at
the rank freezes, or its host or link is gone
                            its heartbeats stop: ranks that wait for it fail and name it (liveness/)

Messages go to stderr, and into the run's record and the failure file where these are enabled.
Where ranks may leave (hogbatch, with that option), a failure ends its own rank only.

torchrun's error file gets the error and its time: torchrun reports the earliest as the root cause.

The failure file keeps a rank's error in case the job's output is lost:

    GTOPK_FAILURE_DIR=DIR    DIR/failure_rank2.json, for each rank that failed
    GTOPK_RUN=DIR            the same, beside the run's record

Without either, nothing is written. A rank that joins a world removes its own file and those of
ranks outside the world: in a folder that all hosts share, they are left from an earlier run. A rank
that cannot join also writes one: if mpirun is gone, nobody reads what the ranks print.

    rank, size, host, pid    of the rank; as launched, if it could not join
    time                     time of writing, UTC
    gtopk                    the version
    step                     the rank's step
    operation                the operation that ran or failed; null: the rank was computing
    error, text              the exception's type and text; or null, and how the rank was ended
    lost                     ranks known here to have died, each with rank and why; the first loss
                             that the heartbeat detected comes first
    traceback                null if another rank is the cause

The file holds no environment variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from collectives.errors import PeerError
from collectives.transports import Transport
from collectives.transports.transport import end_process

from ... import __version__, settings
from ...errors import HorovodInternalError
from .. import standard_streams
from ..launch.job import own_place
from ..liveness.heartbeat import Heartbeat, LostRank
from ..liveness.watchdog import now, write_record

if TYPE_CHECKING:
    from .membership import World

_NAME: Final = re.compile(r"failure_rank(\d+)\.json")


def folder_from() -> str:
    """Return the folder for failure files; "": write none."""
    return settings.FAILURE_DIR.read() or settings.RUN.read()


def path_of(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"failure_rank{rank}.json")


def remove_earlier(folder: str, rank: int, size: int) -> None:
    """Remove this rank's file from an earlier run, and files of ranks outside this run."""
    if not folder:
        return
    with contextlib.suppress(OSError):  # if it cannot delete there, it cannot write there either
        path_of(folder, rank).unlink(missing_ok=True)
        for path in Path(folder).iterdir():
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) >= size:
                path.unlink(missing_ok=True)


def write(
    folder: str,
    rank: int,
    size: int,
    error: BaseException | None,
    *,
    step: int = 0,
    operation: str = "init",
    how: str = "",
    lost: Sequence[LostRank] = (),
) -> None:
    """Write a rank's failure file atomically (rename); ignore disk errors.

    error: its exception; None: it was ended. operation: "": it was computing. how: how it ended.
    The defaults fit a rank that could not join the others; `rank` is then the launcher's number.
    """
    # If another rank is the cause, the traceback only shows where this rank waited.
    is_own = error is not None and not isinstance(error, HorovodInternalError | PeerError)
    content = {
        **record_of(rank, size),
        "step": step,
        "operation": operation or None,
        "error": None if error is None else type(error).__name__,
        "text": how if error is None else str(error),
        "lost": [{"rank": each.rank, "why": each.why} for each in lost],
        "traceback": "".join(traceback.format_exception(error)) if is_own else None,
    }
    write_record(str(path_of(folder, rank)), content)


def record_of(rank: int, size: int) -> dict[str, Any]:
    """Return the failure file's entries for a rank at its start, without an error yet.

    JSON keeps the order, which is that of the list above.
    """
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": now(),
        "gtopk": __version__,
        "step": 0,
        "operation": "init",
        "error": None,
        "text": "",
        "lost": [],
        "traceback": None,
    }


_PATH: Final = "TORCHELASTIC_ERROR_FILE"
_CONSEQUENCE_SECONDS: Final = 10  # torchrun notices a rank's end within this time


def write_error_file(text: str, error: BaseException | None) -> None:
    """Write torchrun's error file for this rank; without torchrun, do nothing.

    error: with its traceback; None: another rank is the cause. The file then gets a time in the
    future: torchrun reports the earliest failure as the root cause, and gives a killed rank, which
    has no file, the time at which it notices the death.
    """
    path = os.environ.get(_PATH)
    if not path:
        return
    when = int(time.time())
    extra = {"timestamp": str(when + _CONSEQUENCE_SECONDS)}
    if error is not None:
        stack = "".join(traceback.format_exception(error))
        extra = {"py_callstack": f"{text}\n{stack}", "timestamp": str(when)}
    with contextlib.suppress(OSError):  # the rank ends anyway, and has printed its error
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


_LOSS_WAIT_SECONDS: Final = 0.3  # how long a stopped rank waits for a report of a lost rank
_FIRST_LOSS_WAIT_SECONDS: Final = 0.1  # how long it waits before it records its end without any
_STUCK_SECONDS: Final = 3.0  # for an operation to notice a lost rank
_POLL_SECONDS: Final = 0.1
_PRINT_SECONDS: Final = 1.0  # for other ranks to print their errors before an abort
_DISK_SECONDS: Final = 1.0  # for writes to a disk, which may be on the lost host


def is_needed(transport: Transport) -> bool:
    """Tell whether a failure of this process affects other processes."""
    return transport.name != "local" and transport.size > 1


def call_after_fork(hook: Callable[[], None]) -> None:
    """Call the hook in every forked child, and hold back a SIGTERM to the child until then.

    Before that, Python loses the signal, or calls the rank's handler for it in the child.
    """
    mask = threading.local()

    def block() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def in_child() -> None:
        try:
            hook()
        finally:
            restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=in_child)


class Guard:
    """Reports how this process ends, and ends the job; only needed with several processes.

    Call `install` to begin watching, and `remove` after a `shutdown`.
    """

    _installed: ClassVar[Guard | None] = None  # the active guard

    def __init__(
        self, world: World, heartbeat: Heartbeat | None = None, failures: str = ""
    ) -> None:
        """heartbeat: the one introduced to this world; None: silent ranks go undetected.

        failures: the folder for failure files; "": write none.
        """
        self.world = world
        self.needed = is_needed(world.transport)
        self.name = f"rank {world.transport.rank} of {world.transport.size}"
        self.place = own_place()
        self._excepthook = sys.excepthook
        self._threading_excepthook = threading.excepthook
        # An absolute path, which stays valid if the script changes its directory.
        self._failure_folder = os.path.abspath(failures) if failures else ""
        self._retired = self._has_reported = False  # reported: its error was printed
        self._reporting: set[int] = set()  # threads that are printing an error
        self._sigterm_pending = False  # SIGTERM came meanwhile
        self._is_stopping = False  # announcing a SIGTERM, which takes a second or two
        self._heartbeat = heartbeat

    def install(self) -> None:
        """Set the exception hooks, and SIGTERM's handler unless the script has one; start beats."""
        self.world.engine.departure_notice = self.departure_notice
        if not self.needed:
            return
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        Guard._installed = self
        # Keep a script's own handler, which may save. Only the main thread can set one.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        if heartbeat := self._heartbeat:
            heartbeat.on_lost = self._on_lost
            heartbeat.start(self.world.introductions)
            self.world.on_change = heartbeat.note
            heartbeat.note(self.world.step, self.world.advice)

    def close(self) -> None:
        """Stop the heartbeat, once this rank and the others have left."""
        if self._heartbeat:
            self._heartbeat.close()
            # Also ends the thread of `_end_if_stuck`, which would abort a job that goes on.
            self._heartbeat = None

    def release_after_fork(self) -> None:
        """Remove the guard from a forked process; the companion stays with the parent."""
        if self._heartbeat:
            self._heartbeat.release_after_fork()
            self._heartbeat = None
        self.remove()

    def remove(self) -> None:
        """Close, and restore our hooks: this process is no rank now; later calls change nothing.

        Any thread may call it, but only the main thread can restore SIGTERM's handler. Elsewhere
        the handler stays, and then acts as the default one.
        """
        self.close()
        self._retired = True
        if Guard._installed is self:
            Guard._installed = None
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._threading_excepthook
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def has_lost_rank(self) -> bool:
        """Tell whether a rank is lost; waits up to 0.3 s for a report of one."""
        return self._heartbeat is not None and self._heartbeat.lost(_LOSS_WAIT_SECONDS) is not None

    def departure_notice(self, how: str) -> str:
        """Return the text that peers get when this rank leaves."""
        return f"{how} at step {self.world.step}; {self.place}"

    def _print(self, what: str) -> None:
        # In a thread: a SIGTERM handler may interrupt a print of the main thread, which holds the
        # stream's lock, and another thread's print may block on its reader for ever.
        standard_streams.run_within(standard_streams.flush, _DISK_SECONDS)
        standard_streams.write_line(f"{self.name} ({self.place}) {what}")

    def report(self, error: BaseException) -> None:
        """Report this rank's error: to stderr, to torchrun, and through the companion."""
        if self.needed:
            self._has_reported = True
            failed = self._failure_text(error)
            advice = "" if self.world.advice in failed else f"; {self.world.advice}"
            if self._heartbeat:
                self._heartbeat.explain(failed)
            # A HorovodInternalError is caused by another rank.
            cause = None if isinstance(error, HorovodInternalError) else error
            write_error_file(f"{self.name} ({self.place}) {failed}", cause)
            end = "the others continue" if self.world.engine.ranks_may_leave else "ending the job"
            self._print(f"{failed}; {end}{advice}")

    def _failure_text(self, error: BaseException, place: str = "") -> str:
        """Return the text of a failure; place: text to add after the step."""
        where = self.world.where()
        return f"failed {where}{place}: {describe(error, where)}"

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        # Print the traceback before the process ends.
        self._excepthook(kind, error, traceback)
        self._fail(error)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        self._threading_excepthook(arguments)
        # SystemExit in a thread only ends that thread, as without gtopk. So does any exception once
        # this rank leaves: its daemon threads may still begin operations, which then fail.
        if arguments.exc_type is not SystemExit and not self.world.is_leaving:
            self._fail(arguments.exc_value or arguments.exc_type())

    def _fail(self, error: BaseException) -> None:
        with self._delay_sigterm():
            self.report(error)
            self._record_end(self._failure_text(error), error)
        if self.world.engine.ranks_may_leave:
            self._end_alone(error)
        how = self._failure_text(error, place=f" ({self.place})")
        self._announce_and_wait(how)
        self.world.transport.abort(1, how)

    @contextlib.contextmanager
    def _delay_sigterm(self) -> Iterator[None]:
        """Delay SIGTERM until the body ends: launchers send it as soon as one rank is lost."""
        self._reporting.add(threading.get_ident())
        try:
            yield
        finally:
            self._reporting.discard(threading.get_ident())
            if self._sigterm_pending and not self._reporting:
                os.kill(os.getpid(), signal.SIGTERM)

    def _announce_and_wait(self, how: str) -> None:
        """Announce the departure, and wait 1 s: an abort would cut off the others' messages.

        Always wait the full second, even if all ranks have departed: a rank whose operation failed
        departs before it prints. Announce in a thread, as a failed transport may never return.
        """
        until = time.monotonic() + _PRINT_SECONDS
        standard_streams.run_within(
            lambda: self.world.transport.leave(how, _PRINT_SECONDS), 2 * _PRINT_SECONDS
        )
        time.sleep(max(0.0, until - time.monotonic()))

    def _end_alone(self, error: BaseException) -> None:
        """Leave and end this process at once with exit code 1; the others notice its absence."""
        how = self.departure_notice(f"raised {describe(error, self.world.where())}")
        self.world.transport.leave(how, _PRINT_SECONDS)
        # Skip exit handlers: MPI's would wait for the other ranks, which go on.
        end_process(1)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._retired and (active := Guard._installed) is not None:
            # A recovery happened within `termination`, which restores this old handler at its end.
            active._on_sigterm(number, frame)
            return
        if self._reporting:
            self._sigterm_pending = True
            return
        if self._is_stopping:
            return  # launchers send it to a process, then to its group
        self._is_stopping = True
        if not self._retired and not self._has_reported:  # else its error has been printed
            self._announce_stop()
        # Use the default handler, so that the launcher sees that the signal ended this rank.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _announce_stop(self) -> None:
        advice = f"; {self.world.advice}" if self.world.advice else ""
        stopped = f"was stopped by SIGTERM at step {self.world.step}, {self._activity_text()}"
        if self._heartbeat:
            lost = self._heartbeat.lost(_FIRST_LOSS_WAIT_SECONDS)
            if lost is None:
                # Usually Ctrl-C. Open MPI kills a rank 0.24 s after SIGTERM: its end must be in the
                # run's record before that; the record keeps the first reason.
                self._record_end(stopped)
                lost = self._heartbeat.lost(_LOSS_WAIT_SECONDS)
            stopped += f", as rank {lost.rank} is lost ({lost.why})" if lost else ""
            self._heartbeat.explain(stopped)
            # Without a lost rank, SIGTERM comes from a scheduler or a user, and is no failure.
            if lost:
                write_error_file(f"{self.name} ({self.place}) {stopped}", None)
        self._print(f"{stopped}{advice}")
        self._record_end(stopped)

    def _on_lost(self, lost: LostRank) -> None:
        # First: this makes operations that wait for it fail, and the script may catch the error.
        self.world.transport.lose(lost.rank, lost.why)
        if self.world.engine.ranks_may_leave:
            return
        if self.world.termination_requested:  # the step that would tell all ranks never ends
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=self._end_if_stuck, args=(lost,), daemon=True).start()

    def _end_if_stuck(self, lost: LostRank) -> None:
        """End the job if an operation does not notice a loss, say because it is in MPI or gloo."""
        engine = self.world.engine
        since, cycles = time.monotonic(), engine.cycles
        while self._heartbeat is not None:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            # If operations still complete, the engine meets the loss and raises it in the script.
            if engine.activity == "idle" or engine.cycles != cycles:
                since, cycles = now, engine.cycles
            elif now - since > _STUCK_SECONDS:
                why = (
                    f"at step {self.world.step}, {self._activity_text()}, as rank {lost.rank} is "
                    f"lost ({lost.why})"
                )
                self._print(f"ends the job {why}")
                self._record_end(f"ended the job {why}")
                self.world.transport.abort(1, f"was {why}")

    def _record_end(self, how: str, error: BaseException | None = None) -> None:
        """Write how this rank ends into the run's record and, on a failure, the failure file.

        error: this rank's; None: it was ended from outside.
        """
        standard_streams.run_within(lambda: self._write(how, error), _DISK_SECONDS)

    def _write(self, how: str, error: BaseException | None) -> None:
        lost = self._lost_ranks()
        # A rank that is stopped while no rank is lost has not failed.
        if self._failure_folder and (error is not None or (lost and not self._has_reported)):
            write(
                self._failure_folder,
                self.world.transport.rank,
                self.world.transport.size,
                error,
                step=self.world.step,
                operation=self._operation(error),
                how=how,
                lost=lost,
            )
        self.world.note_end(how, in_order=False)

    def _operation(self, error: BaseException | None) -> str:
        """Return the operation that failed or is running; "": this rank is computing."""
        failed = error.operation if isinstance(error, HorovodInternalError) else ""
        activity = self.world.engine.activity
        return failed or self.world.engine.failed_in or ("" if activity == "idle" else activity)

    def _lost_ranks(self) -> list[LostRank]:
        """Return the ranks known here to have died; the first that the heartbeat detected is first.

        It may include ranks that the launcher has ended since.
        """
        transport = self.world.transport
        departures = transport.departures()
        lost = {
            rank: departures[rank].reason if rank in departures else "reported lost by another rank"
            for rank in transport.lost()
        }
        first = self._heartbeat.lost() if self._heartbeat else None
        if first:
            lost.pop(first.rank, None)
        return [*([first] if first else []), *(LostRank(*each) for each in sorted(lost.items()))]

    def _activity_text(self) -> str:
        activity = self.world.engine.activity
        return "computing" if activity == "idle" else f"in {activity}"


def describe(error: BaseException, where: str = "") -> str:
    """Return an exception's type and text on one line.

    where: the step's text, which is cut off the end, as the caller already prints it.
    """
    text = " ".join(str(error).split()).removesuffix(f"; {where}")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
