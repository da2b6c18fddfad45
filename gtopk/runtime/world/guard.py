"""No rank hangs: whatever ends one rank ends the job, and says which rank and at which step.

an exception (any thread)   printed with rank and step, then the job is aborted
the program ends, or calls sys.exit, while its peers go on
                            their next operation fails and names this rank (Engine, Transport)
a signal kills it           the launcher ends the others; each says at which step it was stopped
it freezes, or its host or link is gone
                            its heartbeat tells: who waits for it fails and names it (heartbeat/)

What is said goes to stderr, into the run's record and into a file, where there are.
Where ranks may leave (hogbatch, if told so), what ends one rank ends that rank only.

The error file: where torchrun looks for what a rank failed with, and when, to name the first.

The failure file: what a rank failed with, for who looks when the job's output is gone.

    GTOPK_FAILURE_DIR=DIR    DIR/failure_rank2.json, of each rank that failed
    GTOPK_RUN=DIR            the same, beside the run's record

Without either nothing is written. A rank removes its own when it joins a world, and those of ranks
that are not in it: in a folder that all hosts share, one that is there is of the last run. A rank
that cannot join writes one, too: where mpirun is gone, nobody reads what its ranks print any more.

    rank, size, host, pid    whose it is; as launched, where it could not join
    time                     when it was written, UTC
    gtopk                    the version
    step                     that the rank was in
    operation                that it was in, or that failed; null: it computed
    error, text              the exception's type and text; null, and how it was ended
    lost                     the ranks that died, as far as it is known here, the first one first
                             where the heartbeat saw it: rank, why
    traceback                null where another rank is the cause

Nothing of its environment is in it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Protocol

from collectives.errors import PeerError
from collectives.transports import Transport

from ... import __version__, settings
from ...errors import HorovodInternalError
from .. import standard_streams
from ..coordinator import Engine
from ..launch.watchdog import now, write_record
from ..liveness.heartbeat import Heartbeat, Lost

_NAME: Final = re.compile(r"failure_rank(\d+)\.json")


def folder_from(environ: Mapping[str, str] = os.environ) -> str:
    """Return where failure files go; "": nowhere."""
    return settings.FAILURE_DIR.read(environ) or settings.RUN.read(environ)


def path_of(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"failure_rank{rank}.json")


def remove_earlier(folder: str, rank: int, size: int) -> None:
    """Remove this rank's file of an earlier run, and those of ranks that this run lacks."""
    if not folder:
        return
    with contextlib.suppress(OSError):  # who cannot write there writes none either
        path_of(folder, rank).unlink(missing_ok=True)
        for path in Path(folder).iterdir():
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) >= size:
                path.unlink(missing_ok=True)


def write(
    folder: str,
    rank: int,
    size: int,
    *,
    step: int,
    operation: str,
    how: str,
    error: BaseException | None,
    lost: Sequence[Lost],
) -> None:
    """Write the file beside and rename it; where that cannot be, the rank ends without.

    operation: "": it computed. how: it ended. error: what it raised; None: it was ended.
    """
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
    """Return what is in the file of a rank that has done nothing yet, but for what it failed with.

    JSON keeps the order: it is that of the list above.
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


def write_of_start(folder: str, rank: int, size: int, error: Exception) -> None:
    """Write the file of a rank that could not join the others; its number is the launcher's."""
    write(folder, rank, size, step=0, operation="init", how="", error=error, lost=[])


_PATH: Final = "TORCHELASTIC_ERROR_FILE"
_CONSEQUENCE_SECONDS: Final = 10  # within which torchrun notices a rank's end


def write_error_file(
    text: str, error: BaseException | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Tell torchrun what this rank failed with; without torchrun, do nothing.

    error: with its traceback; None: another rank is the cause. Then the failure is dated later:
    torchrun calls the earliest the root cause, and dates who was killed when it notices.
    """
    path = environ.get(_PATH)
    if not path:
        return
    when = int(time.time())
    extra = {"timestamp": str(when + _CONSEQUENCE_SECONDS)}
    if error is not None:
        stack = "".join(traceback.format_exception(error))
        extra = {"py_callstack": f"{text}\n{stack}", "timestamp": str(when)}
    with contextlib.suppress(OSError):  # it ends anyway, and has said why
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


_WORD_SECONDS: Final = 0.3  # what word of a lost rank gets to come, before who is stopped ends
_STUCK_SECONDS: Final = 3.0  # what an operation gets to notice that a rank is lost
_LOOK_SECONDS: Final = 0.1
_LAST_WORD_SECONDS: Final = 1.0  # what the last words of ranks get to go out
_DISK_SECONDS: Final = 1.0  # what a disk gets to take them: it may be of the host that is lost


class Member(Protocol):
    """The rank that the guard guards, and the ways to end its job."""

    transport: Transport
    engine: Engine
    step: int
    on_change: Callable[[], None]
    advice: str
    termination_requested: bool
    failures: list[Exception]

    def where(self) -> str: ...
    def note_end(self, how: str, in_order: bool) -> None: ...


class Guard:
    """Watches how this process ends; only a world of several processes needs it."""

    def __init__(self, member: Member, heartbeat_seconds: float, failures: str = "") -> None:
        """heartbeat_seconds: after which a silent rank is given up; 0: never.

        failures: the folder of failure files; "": there are none.
        """
        self.member = member
        self.needed = member.transport.name != "local" and member.transport.size > 1
        self.name = f"rank {member.transport.rank} of {member.transport.size}"
        self.place = f"host {socket.gethostname()}, pid {os.getpid()}"
        self._excepthook = sys.excepthook
        self._threading_excepthook = threading.excepthook
        self._handles_sigterm = False
        self._failures = failures
        self._retired = self._told = False  # _told: what this rank failed with
        self._speaks = self._stopped_meanwhile = False  # while it tells that
        self._heartbeat: Heartbeat | None = None
        if self.needed and heartbeat_seconds > 0:
            warning_seconds = member.engine.settings.stall_warning_seconds
            self._heartbeat = Heartbeat(heartbeat_seconds, warning_seconds, self._on_lost)
        self._said_seconds = f"GTOPK_HEARTBEAT_TIMEOUT={heartbeat_seconds:g}"

    def install(self) -> None:
        """Take over the hooks for exceptions, and SIGTERM where nobody handles it; begin to beat.

        All ranks do so together. Raises HorovodInternalError where they disagree about heartbeats.
        """
        self.member.engine.sign = self.departure_notice
        if not self.needed:
            return
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._handles_sigterm = True
        heartbeat = self._heartbeat
        meet = heartbeat.meet if heartbeat else lambda transport, all_flags: None
        self.member.engine.submit("heartbeat", [self._said_seconds], meet).wait()
        if heartbeat:
            heartbeat.start()
            self.member.on_change = lambda: heartbeat.note(self.member.step, self.member.advice)
            self.member.on_change()

    def close(self) -> None:
        """Have the others watch this rank no more, as it has left, and they have."""
        if self._heartbeat:
            self._heartbeat.close()
            self._heartbeat = None

    def forget(self) -> None:
        """Give back what a forked process has of the rank's."""
        if self._heartbeat:
            self._heartbeat.forget()
            self._heartbeat = None
        self.remove()

    def remove(self) -> None:
        """Close, and give back the hooks that are still ours; in the main thread, for SIGTERM."""
        self.retire()
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def retire(self) -> None:
        """Close, in any thread, and let exceptions and SIGTERM be: this process is no rank."""
        self.close()
        self._retired = True
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._threading_excepthook

    def misses_a_rank(self) -> bool:
        """Tell whether a rank is lost, waiting a little for word of one."""
        return self._heartbeat is not None and self._heartbeat.lost(_WORD_SECONDS) is not None

    def departure_notice(self, how: str) -> str:
        """Return what the peers are told when this rank leaves."""
        return f"{how} at step {self.member.step}; {self.place}"

    def _say(self, what: str) -> None:
        # One write: lines of several ranks share a pipe.
        line = f"gtopk: {self.name} ({self.place}) {what}\n"
        standard_streams.flush()
        with contextlib.suppress(OSError):  # stderr is closed
            os.write(2, line.encode(errors="replace"))

    def tell(self, error: BaseException) -> None:
        """Say that this rank failed, and with what."""
        if self.needed:
            self._told = True
            failed = self._failed(error)
            advice = "" if self.member.advice in failed else f"; {self.member.advice}"
            if self._heartbeat:
                self._heartbeat.explain(failed)
            # Of this one another rank is the cause.
            cause = None if isinstance(error, HorovodInternalError) else error
            write_error_file(f"{self.name} ({self.place}) {failed}", cause)
            then = "the others go on" if self.member.engine.ranks_may_leave else "ending the job"
            self._say(f"{failed}; {then}{advice}")

    def _failed(self, error: BaseException, place: str = "") -> str:
        """Return what is said of a failure; place: to be said behind the step."""
        where = self.member.where()
        return f"failed {where}{place}: {describe(error, where)}"

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._excepthook(kind, error, traceback)
        self._fail(error)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        self._threading_excepthook(arguments)
        if arguments.exc_type is not SystemExit:
            self._fail(arguments.exc_value or arguments.exc_type())

    def _fail(self, error: BaseException) -> None:
        with self._to_the_end():
            self.tell(error)
            self._write_down(self._failed(error), error)
        if self.member.engine.ranks_may_leave:
            self._end_alone(error)
        how = self._failed(error, place=f" ({self.place})")
        self._let_the_others_speak(how)
        self.member.transport.abort(1, how)

    @contextlib.contextmanager
    def _to_the_end(self) -> Iterator[None]:
        """Put SIGTERM off: a launcher sends it as soon as one rank is lost, in mid-sentence."""
        self._speaks = True
        try:
            yield
        finally:
            self._speaks = False
            if self._stopped_meanwhile:
                os.kill(os.getpid(), signal.SIGTERM)

    def _let_the_others_speak(self, how: str) -> None:
        """Announce the departure, and wait: an abort would cut the others off in mid-sentence.

        Those whose operation failed departed before they speak, so that all have departed is no
        sign. In a thread: a transport that has failed may never return.
        """
        until = time.monotonic() + _LAST_WORD_SECONDS
        _for_a_moment(
            lambda: self.member.transport.leave(how, _LAST_WORD_SECONDS), 2 * _LAST_WORD_SECONDS
        )
        time.sleep(max(0.0, until - time.monotonic()))

    def _end_alone(self, error: BaseException) -> None:
        """End this process as if it were killed: what the others go by is that it is gone."""
        how = self.departure_notice(f"raised {describe(error, self.member.where())}")
        self.member.transport.leave(how, _LAST_WORD_SECONDS)
        standard_streams.flush()
        os._exit(1)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._speaks:
            self._stopped_meanwhile = True
            return
        if not self._retired and not self._told:  # else it has said why it ends
            self._say_that_it_is_stopped()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _say_that_it_is_stopped(self) -> None:
        advice = f"; {self.member.advice}" if self.member.advice else ""
        stopped = f"was stopped by SIGTERM at step {self.member.step}, {self._doing()}"
        if self._heartbeat:
            lost = self._heartbeat.lost(_WORD_SECONDS)
            stopped += f", as rank {lost.rank} is lost ({lost.why})" if lost else ""
            self._heartbeat.explain(stopped)
            if lost:
                write_error_file(f"{self.name} ({self.place}) {stopped}", None)
        self._say(f"{stopped}{advice}")
        self._write_down(stopped)

    def _on_lost(self, lost: Lost) -> None:
        self.member.transport.lose(lost.rank, lost.why)
        if self.member.engine.ranks_may_leave:
            return
        if self.member.termination_requested:  # it waits for a step after which all know
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=self._end_if_stuck, args=(lost,), daemon=True).start()

    def _end_if_stuck(self, lost: Lost) -> None:
        """End the job where an operation takes no notice of a loss: one inside MPI or gloo."""
        engine = self.member.engine
        since, cycles = time.monotonic(), engine.cycles
        while self._heartbeat is not None:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if engine.activity == "idle" or engine.cycles != cycles:
                since, cycles = now, engine.cycles
            elif now - since > _STUCK_SECONDS:
                why = (
                    f"at step {self.member.step}, {self._doing()}, as rank {lost.rank} is lost "
                    f"({lost.why})"
                )
                self._say(f"ends the job {why}")
                self._write_down(f"ended the job {why}")
                self.member.transport.abort(1, f"was {why}")

    def _write_down(self, how: str, error: BaseException | None = None) -> None:
        """Have the record say how this rank ends, and a file where a failure is the end.

        error: this rank's; None: it was ended.
        """
        _for_a_moment(lambda: self._write(how, error), _DISK_SECONDS)

    def _write(self, how: str, error: BaseException | None) -> None:
        lost = self._lost()
        if self._failures and (error is not None or (lost and not self._told)):
            write(
                self._failures,
                self.member.transport.rank,
                self.member.transport.size,
                step=self.member.step,
                operation=self._operation(error),
                how=how,
                error=error,
                lost=lost,
            )
        self.member.note_end(how, in_order=False)

    def _operation(self, error: BaseException | None) -> str:
        """Return the name of what failed, or is under way; "": this rank computes."""
        failed = error.operation if isinstance(error, HorovodInternalError) else ""
        activity = self.member.engine.activity
        return failed or self.member.engine.failed_in or ("" if activity == "idle" else activity)

    def _lost(self) -> list[Lost]:
        """Return the ranks that died, as far as it is known here, the heartbeat's first one first.

        A launcher ends the others: some of those may be gone, too, by the time this is asked.
        """
        transport = self.member.transport
        said = transport.departures()
        found = {
            rank: said[rank].reason if rank in said else "as another rank says"
            for rank in transport.lost()
        }
        first = self._heartbeat.lost() if self._heartbeat else None
        if first:
            found.pop(first.rank, None)
        return [*([first] if first else []), *(Lost(*each) for each in sorted(found.items()))]

    def _doing(self) -> str:
        activity = self.member.engine.activity
        return "computing" if activity == "idle" else f"in {activity}"


def _for_a_moment(work: Callable[[], object], seconds: float) -> None:
    """Do what may never return, or fail, and go on without it then."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can begin any more
        thread.start()
        thread.join(seconds)


def describe(error: BaseException, where: str = "") -> str:
    """Return an exception's type and text on one line.

    where: what the text may end with, at which step, and is said already.
    """
    text = " ".join(str(error).split()).removesuffix(f"; {where}")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
