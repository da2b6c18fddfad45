"""Watchdog: ends a process if its start takes too long or cannot succeed any more.

    with deadline(WatchdogSettings(120.0, "rank 1 is late")):
        start()

It is a thread or, if the start holds Python's lock throughout, a separate process that ends when
its stdin does. The process's argument is a `WatchdogSettings` as a JSON list.

Also here: reading processes from /proc, and starting a process with only the standard library, for
the companion and others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..standard_streams import write_line

_POLL_SECONDS: Final = 0.3
_KILL_WAIT_SECONDS: Final = 10.0  # for the killed watchdog process to end
_PROC: Final = "/proc"  # does not exist off Linux
# Launchers start their ranks one after the other, and end them all if one fails.
_NEXT_START_SECONDS: Final = 3.0  # after one rank's start, for the launcher to start the next
_END_REPORT_SECONDS: Final = 1.0  # after a rank's end, for its launcher to report it


class Siblings(NamedTuple):
    """The ranks that the watched process's parent has started, including that process.

    message:  the message when some of them have ended; {} stands for their numbers.
    variable: the environment variable of a rank's number; `rank` is the watched process's number.
    ranks:    their number. is_all: whether they are the whole job.
    """

    message: str
    variable: str
    rank: int
    ranks: int
    is_all: bool


class WatchdogSettings(NamedTuple):
    """The watchdog's argument: the conditions to check, and the message for each.

    late:     the message once `seconds` are over.
    orphaned: the message when the process `launcher` is no longer its parent; launcher 0: do not
              check.
    siblings: the ranks to check; None: none.
    file:     the failure file that also gets the message, added to `record`; "": none. Useful if
              the launcher that reads the rank's stderr is gone.
    """

    seconds: float
    late: str
    launcher: int = 0
    orphaned: str = ""
    siblings: Siblings | None = None
    file: str = ""
    record: Mapping[str, Any] = {}


class SiblingWatch:
    """Checks repeatedly whether all siblings are alive."""

    def __init__(self, siblings: Siblings, own: int) -> None:
        self.siblings = siblings
        self._own, self._parent = own, read_process(own).parent
        self._numbers: dict[int, int] = {}  # rank by pid, where the environment shows it
        self._since = 0.0
        self._absent: list[int] | None = None  # ranks missing since `_since`; None: none

    def missing(self) -> str:
        """Return a text that names the ranks that have ended; "": none, or unknown."""
        children = _children(self._parent)
        unidentified = 0  # processes that do not show their rank
        for pid in children - self._numbers.keys():
            number = variable_of(pid, self.siblings.variable)
            if number is None:
                unidentified += 1
            elif number.isdecimal():
                self._numbers[pid] = int(number)
                self._absent = None
        present = {number for pid, number in self._numbers.items() if pid in children}
        ranks = children & self._numbers.keys()
        if len(present) < len(ranks) or self._numbers.get(self._own) != self.siblings.rank:
            self._numbers.clear()  # the variable is not the launcher's, or not set yet
            self._absent = None
            return ""
        if self._own not in children or len(present) + unidentified >= self.siblings.ranks:
            self._absent = None
            return ""
        if self._absent is None:
            known = range(self.siblings.ranks) if self.siblings.is_all else self._numbers.values()
            self._since, self._absent = time.monotonic(), sorted(set(known) - present)
        # Check the ranks' age: a watchdog that began late need not wait for further starts.
        may_start_more = min(map(age_seconds, ranks)) < _NEXT_START_SECONDS
        if may_start_more or time.monotonic() - self._since < _END_REPORT_SECONDS:
            return ""
        numbers = " and ".join(map(str, self._absent))
        if unidentified or not numbers:
            return "a rank has ended"
        return f"ranks {numbers} have ended" if self._absent[1:] else f"rank {numbers} has ended"


def _children(pid: int) -> set[int]:
    """Return the pids of a process's living children."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        # Each thread of a launcher lists only the children that it has started.
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                pids.update(map(int, children.read().split()))
    return {child for child in pids if read_process(child).state}


class Process(NamedTuple):
    """A process as /proc shows it.

    state: a letter; "" if it has ended, "?" off Linux, where it is unknown.
    parent: its pid; 0 if unknown.
    started: in ticks since boot; 0 if unknown.
    """

    state: str
    parent: int
    started: int = 0


def read_process(pid: int) -> Process:
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as stat:
            # After the last parenthesis: the program's name may contain any character.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return Process("" if os.path.exists(f"{_PROC}/self") else "?", 0)
    state = "" if fields[0] in (b"Z", b"X") else fields[0].decode()
    return Process(state, int(fields[1]), int(fields[19]))


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable's value at a process's start; "": not set, None: it cannot be read.

    A process may have overwritten its environment with other text (setproctitle).
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            variables = environ.read().split(b"\0")
    except OSError:
        return None
    if not any(b"=" in each for each in variables):
        return None
    start = f"{name}=".encode()
    found = (each for each in variables if each.startswith(start))
    return next(found, b"").removeprefix(start).decode(errors="replace")


def age_seconds(pid: int) -> float:
    """Return how many seconds ago a process was started; 0 if unknown."""
    started = read_process(pid).started
    if not started:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a record as JSON atomically (rename); on failure, leave no file."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(temporary, "w") as file:
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def now() -> str:
    """Return the time for a record: UTC, to the millisecond."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    # Not with datetime, as its import would delay the companion.
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{text}.{nanoseconds // 10**6:03}+00:00"


def watch(settings: WatchdogSettings, watched: int, is_over: Callable[[float], bool]) -> None:
    """Watch a process until its start is over; end it when one of its conditions comes true.

    is_over: waits at most the given seconds; tells whether the start is over.
    """
    begun = time.monotonic()
    siblings = SiblingWatch(settings.siblings, watched) if settings.siblings is not None else None
    while True:
        left = max(0.0, begun + settings.seconds - time.monotonic())
        if is_over(min(left, _POLL_SECONDS)):
            return
        why = settings.late if time.monotonic() - begun >= settings.seconds else ""
        if siblings is not None and (ended := siblings.missing()):
            why = siblings.siblings.message.format(ended)
        if settings.launcher and read_process(watched).parent not in (0, settings.launcher):
            why = settings.orphaned
        if why and not is_over(0.0):  # the check may have taken long
            write_line(why)
            if settings.file:
                write_record(settings.file, {**settings.record, "time": now(), "text": why})
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched, signal.SIGKILL)
            return


def command_of(module: str) -> list[str]:
    """Return the command that runs `main` of a module in this folder, without the rest of gtopk.

    It skips the user's site packages and PYTHONPATH, to start quickly and run none of their code.
    """
    begin = (
        "import sys, types; package = sys.modules['gtopk'] = types.ModuleType('gtopk'); "
        "package.__path__ = [sys.argv.pop(1)]; "
        f"from gtopk.runtime.liveness.{module} import main; main()"
    )
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [sys.executable, "-IS", "-c", begin, package]


@contextlib.contextmanager
def deadline(settings: WatchdogSettings, *, holds_lock: bool = True) -> Iterator[None]:
    """Kill this process with a message if one of the conditions comes true in the body.

    holds_lock: whether the body may hold Python's lock throughout: then a process watches, which
        takes about 20 ms of a core to start; else a thread.
    """
    if settings.seconds == math.inf and not settings.launcher and settings.siblings is None:
        yield
        return
    if not holds_lock:
        over = threading.Event()
        threading.Thread(
            target=watch,
            args=(settings, os.getpid(), over.wait),
            name="gtopk-watchdog",
            daemon=True,
        ).start()
        try:
            yield
        finally:
            over.set()
        return
    import subprocess  # imported late: the watchdog's own process does not need it

    command = [*command_of("watchdog"), json.dumps(settings)]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert watchdog.stdin is not None
    try:
        yield
    finally:
        # Else this process would wait until it has started and read its closed stdin.
        watchdog.kill()
        watchdog.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a page fault in /proc may delay it
            watchdog.wait(_KILL_WAIT_SECONDS)


def main() -> None:
    """Watch the process that started this one, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the watched process handles Ctrl-C
    settings = WatchdogSettings(*json.loads(sys.argv[1]))
    siblings = Siblings(*settings.siblings) if settings.siblings else None
    watch(
        settings._replace(siblings=siblings),
        os.getppid(),
        lambda seconds: bool(select.select([0], [], [], seconds)[0]),
    )
