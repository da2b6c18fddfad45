"""What a rank reports at its end: a result, or an error in words."""

from __future__ import annotations

import os
import socket
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from ...errors import HorovodInternalError
from .. import object_codec as objects


class Failure(NamedTuple):
    """An exception on a rank.

    what:        "raised ValueError: ...", or how else it failed.
    traceback:   as Python prints it.
    consequence: whether another rank's end or failure is the likely cause.
    place:       host and process.
    """

    what: str
    traceback: str
    consequence: bool
    place: str


def place() -> str:
    """Return where this process is, in words."""
    return f"host {socket.gethostname()}, pid {os.getpid()}"


def of_result(result: Any, allow_pickle: bool) -> bytes:
    """Return the report of a call that returned; raise TypeError where the result cannot travel."""
    return objects.encode({"result": result}, allow_pickle=allow_pickle)


def of_error(error: BaseException, own_frames: int) -> bytes:
    """Return the report of a call that failed; own_frames: how many of the outermost are ours."""
    trace: TracebackType | None = error.__traceback__
    for _ in range(own_frames):
        trace = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r}) and returned no result"
    else:
        words = " ".join(str(error).split())
        what = f"raised {type(error).__name__}{words and f': {words}'}"
    consequence = isinstance(error, HorovodInternalError)
    failure = Failure(what, text, consequence, place())
    return objects.encode({"failure": [*failure]}, allow_pickle=False)


def read(content: bytes, allow_pickle: bool) -> tuple[Any, Failure | None]:
    """Return the result, or the failure, of a report."""
    report = objects.decode(content, allow_pickle=allow_pickle)
    if "failure" in report:
        return None, Failure(*report["failure"])
    return report["result"], None
