"""No rank hangs: whatever ends one rank ends the job, and says which rank and at which step.

an exception (any thread)   printed with rank and step, then the job is aborted
the program ends, or calls sys.exit, while its peers go on
                            their next operation fails and names this rank (Engine, Transport)
a signal kills it           the launcher ends the others; each says at which step it was stopped

Where ranks may leave (hogbatch, if told so), an exception ends its rank only.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Final, Protocol

from collectives.transports import Transport

from .engine import Engine

_WORD_SECONDS: Final = 1.0  # what a last word gets to go out


class Member(Protocol):
    """What the guard needs to know of the rank it guards."""

    transport: Transport
    engine: Engine
    step: int
    advice: str


class Guard:
    """Watches how this process ends; only a world of several processes needs it."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.needed = member.transport.name != "local" and member.transport.size > 1
        self.name = f"rank {member.transport.rank} of {member.transport.size}"
        self.place = f"host {socket.gethostname()}, pid {os.getpid()}"
        self._excepthook = sys.excepthook
        self._threading_excepthook = threading.excepthook
        self._handles_sigterm = False

    def install(self) -> None:
        """Take over the hooks for exceptions, and SIGTERM where nobody handles it."""
        self.member.engine.on_program_end = lambda: self.farewell("its program ended")
        if not self.needed:
            return
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._handles_sigterm = True

    def remove(self) -> None:
        """Give back the hooks that are still ours."""
        if not self.needed:
            return
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._threading_excepthook
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def farewell(self, how: str) -> str:
        """Return what the peers are told when this rank leaves."""
        return f"{how} at step {self.member.step}; {self.place}"

    def _say(self, what: str) -> None:
        # One write: lines of several ranks share a pipe.
        line = f"gtopk: {self.name} ({self.place}) {what}\n"
        sys.stderr.flush()
        os.write(2, line.encode(errors="replace"))

    def tell(self, error: BaseException) -> None:
        """Say that this rank failed, and with what."""
        if self.needed:
            what = describe(error)
            advice = "" if self.member.advice in what else f"; {self.member.advice}"
            then = "the others go on" if self.member.engine.ranks_may_leave else "ending the job"
            self._say(f"failed at step {self.member.step}: {what}; {then}{advice}")

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._excepthook(kind, error, traceback)
        self.tell(error)
        if self.member.engine.ranks_may_leave:
            self._end_alone(error)
        self.member.transport.abort(1)

    def _end_alone(self, error: BaseException) -> None:
        """End this process as if it were killed: what the others go by is that it is gone."""
        self.member.transport.leave(self.farewell(f"raised {describe(error)}"), _WORD_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        self._threading_excepthook(arguments)
        if arguments.exc_type is not SystemExit:
            self.tell(arguments.exc_value or arguments.exc_type())
            self.member.transport.abort(1)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        advice = f"; {self.member.advice}" if self.member.advice else ""
        self._say(f"was stopped by SIGTERM at step {self.member.step}, {self._doing()}{advice}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _doing(self) -> str:
        activity = self.member.engine.activity
        return "computing" if activity == "idle" else f"in {activity}"


def describe(error: BaseException) -> str:
    """Return an exception's type and text on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
