"""The call for all ranks, and their reports.

A call contains the function's name, and the arguments as typed msgpack. The name is
module:qualname. For a function in the script itself it is "__main__:qualname" with the script's
path, which each rank loads like multiprocessing's spawn does (under the name __mp_main__, so that
code below `if __name__ == "__main__":` does not run again).

`collect` waits for every rank's report, and returns the results or raises one error that says which
rank failed, and how. A rank that lost a peer reports that at once, maybe before the lost peer
reports the cause. `collect` waits for the cause and raises it.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, NamedTuple

from ... import __version__
from ...errors import HorovodInternalError, RankError
from .. import object_codec as objects
from ..coordinator.agreement import name_ranks
from ..launch import LaunchError
from ..launch.job import own_place
from .call_server import CallServer

# The parts of multiprocessing's preparation data that make imports work in a spawned process.
_PREPARATION_KEYS: Final = (
    *("sys_path", "sys_argv", "dir", "init_main_from_name", "init_main_from_path"),
)
_ALLOW_PICKLE: Final = (
    "allow pickles, which can execute any code on the receiver: "
    "gtopk.run(..., allow_pickle=True), or GTOPK_ALLOW_PICKLE=1"
)


def pack(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    allow_pickle: bool,
    to_install: Sequence[str],
) -> tuple[bytes, bytes]:
    """Return the bytes of the preparation, which a rank needs before any import, and of the call.

    to_install: modules with an `install` function to call before the ranks import anything else.
    Raises TypeError for objects that need a pickle, if pickles are not allowed.
    """
    data = spawn.get_preparation_data("gtopk.run")
    surroundings = {name: data[name] for name in _PREPARATION_KEYS if name in data}
    in_script = "init_main_from_name" in data or "init_main_from_path" in data
    path = reference(func, in_script=in_script)
    if path is None and not allow_pickle:
        raise TypeError(
            f"gtopk.run sends a function by its name, and {func!r} has none under which another "
            f"process could import it: define it with def at the top of a module or script; or "
            f"{_ALLOW_PICKLE}"
        )
    call = {"function": func if path is None else path, "args": list(args), "kwargs": {**kwargs}}
    try:
        content = objects.encode(call, allow_pickle=allow_pickle)
    except TypeError as error:
        if allow_pickle:
            raise
        raise TypeError(f"gtopk.run: {error}; for this call only, pass allow_pickle=True") from None
    # A rank only loads the script if it needs it, as loading may take long.
    needs_script = b"__main__:" in content or objects.holds_pickle(content)
    if not needs_script:
        surroundings = {k: v for k, v in surroundings.items() if not k.startswith("init_main")}
    preparation = {
        "version": __version__,
        "surroundings": surroundings,
        "allow_pickle": allow_pickle,
        "to_install": list(to_install),
    }
    return objects.encode(preparation, allow_pickle=False), content


def reference(func: Callable[..., Any], in_script: bool) -> str | None:
    """Return "module:qualname" if that name leads to this function, else None.

    in_script: whether other processes can load this one's __main__.
    """
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if module is None or name is None or (module == "__main__" and not in_script):
        return None
    path = f"{module}:{name}"
    try:
        # The name may lead to another object, such as a decorator's result.
        return path if resolve(path) is func else None
    except (ImportError, AttributeError):
        return None


def resolve(path: str) -> Any:
    """Return the object that "module:qualname" names."""
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def execute(content: bytes, allow_pickle: bool) -> Any:
    """Make the call, and return its result."""
    # The sender may choose the code to run here: it has proved that it knows the job's secret.
    call = objects.decode(content, allow_pickle=allow_pickle, imports=True)
    function = call["function"]
    if isinstance(function, str):
        function = resolve(function)
    return function(*call["args"], **call["kwargs"])


class Failure(NamedTuple):
    """An exception on a rank.

    what:        "raised ValueError: ...", or another kind of failure.
    traceback:   as Python prints it.
    consequence: whether another rank's end or failure is the likely cause.
    place:       host and process.
    """

    what: str
    traceback: str
    consequence: bool
    place: str


def result_report(result: Any, allow_pickle: bool) -> bytes:
    """Return the report of a successful call; raise TypeError if the result cannot be encoded."""
    return objects.encode({"result": result}, allow_pickle=allow_pickle)


def error_report(error: BaseException, own_frames: int) -> bytes:
    """Return the report of a failed call, without its `own_frames` outermost frames."""
    trace: TracebackType | None = error.__traceback__
    for _ in range(own_frames):
        trace = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r}) and returned no result"
    else:
        message = " ".join(str(error).split())
        what = f"raised {type(error).__name__}{message and f': {message}'}"
    consequence = isinstance(error, HorovodInternalError)
    # Send only texts: the caller may not have the exception's class.
    failure = Failure(what, text, consequence, own_place())
    return objects.encode({"failure": [*failure]}, allow_pickle=False)


def read_report(content: bytes, allow_pickle: bool) -> tuple[Any, Failure | None]:
    """Return the result, or the failure, in a report."""
    report = objects.decode(content, allow_pickle=allow_pickle)
    if "failure" in report:
        return None, Failure(*report["failure"])
    return report["result"], None


_POLL_SECONDS: Final = 0.1  # how often to check whether the launcher has ended
_CAUSE_SECONDS: Final = 5.0  # for the cause to be reported after a consequence
_LEAVE_SECONDS: Final = 2.0  # for ranks to end after one has failed
_DRAIN_SECONDS: Final = 2.0  # for reports to arrive after the launcher has ended
_END_SECONDS: Final = 30.0  # for ranks to end after they have reported


def collect(
    server: CallServer,
    launcher: subprocess.Popen[bytes],
    ranks: int,
    start_seconds: float,
    allow_pickle: bool,
) -> list[Any]:
    """Return the results in rank order, once all ranks have reported and ended.

    Raises RankError for the first rank that failed or was lost, LaunchError if a rank has not begun
    start_seconds after the first call, or the launcher ended before it began.
    """
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    begun = time.monotonic()
    ended: float | None = None  # since when the launcher has ended
    failed: float | None = None  # since when a rank has failed or is lost
    while len(results) < ranks:
        with server.changed:
            server.changed.wait(_POLL_SECONDS)
            new_reports = {
                r: c for r, c in server.reports.items() if r not in results and r not in failures
            }
            lost = [rank for rank in server.disconnected if rank not in server.reports]
            absent = sorted(set(range(ranks)) - server.connected)
        for rank, content in new_reports.items():
            result, failure = read_report(content, allow_pickle)
            if failure is None:
                results[rank] = result
            else:
                failures[rank] = failure
        now = time.monotonic()
        if ended is None and launcher.poll() is not None:
            ended = now
        if failed is None and (failures or lost):
            failed = now
        causes = [rank for rank in sorted(failures) if not failures[rank].consequence]
        if causes:
            _wait_for_end(launcher, _LEAVE_SECONDS)
            raise _rank_error(causes[0], ranks, failures[causes[0]])
        # Reports may still be on their way, including one with the cause.
        if (ended and now > ended + _DRAIN_SECONDS) or (failed and now > failed + _CAUSE_SECONDS):
            raise _error_without_cause(failures, lost, absent, ranks, launcher)
        if absent and now > begun + start_seconds:
            raise LaunchError(
                f"all {ranks} ranks must begin within {start_seconds:g} s (start_timeout); "
                f"{name_ranks(absent)} did not"
            )
    if not _wait_for_end(launcher, _END_SECONDS):
        print("gtopk.run: ending ranks that have reported but do not exit", file=sys.stderr)
    return [results[rank] for rank in range(ranks)]


def _wait_for_end(launcher: subprocess.Popen[bytes], seconds: float) -> bool:
    """Let the ranks end by themselves, which prints less than killing them; tell if they did."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)
    return launcher.poll() is not None


def _rank_error(rank: int, ranks: int, failure: Failure) -> RankError:
    return RankError(
        rank, f"rank {rank} of {ranks} ({failure.place}) {failure.what}", failure.traceback
    )


def _error_without_cause(
    failures: dict[int, Failure],
    lost: Sequence[int],
    absent: list[int],
    ranks: int,
    launcher: subprocess.Popen[bytes],
) -> RuntimeError:
    """Return the error for a job if no rank reported a cause."""
    code = launcher.poll()
    end = "its launcher still runs" if code is None else f"its launcher ended with exit code {code}"
    if lost:
        first, *later = lost
        # If the launcher ends the others at once, this may not be the real order.
        others = f", and then {name_ranks(later)}" if later else ""
        return RankError(
            first,
            f"rank {first} of {ranks} ended without a report (killed, or out of memory?){others}; "
            f"{end}",
        )
    if failures:
        first = min(failures)
        return _rank_error(first, ranks, failures[first])
    return LaunchError(f"{name_ranks(absent)} of {ranks} did not begin; {end}")
