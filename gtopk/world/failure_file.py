"""The failure file: what a rank failed with, for who looks when the job's output is gone.

    GTOPK_FAILURE_DIR=DIR    DIR/failure_rank2.json, of each rank that failed
    GTOPK_RUN=DIR            the same, beside the run's record

Without either nothing is written. A rank removes its own when it joins a world, and those of ranks
that are not in it: in a folder that all hosts share, one that is there is of the last run.

    rank, size, host, pid    whose it is
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
import datetime
import json
import os
import re
import socket
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from .. import __version__, settings
from ..errors import HorovodInternalError
from ..heartbeat.heartbeat import Lost

_NAME: Final = re.compile(r"failure_rank(\d+)\.json")


def folder_from(environ: Mapping[str, str] = os.environ) -> str:
    """Return where failure files go; "": nowhere."""
    return settings.FAILURE_DIR.read(environ) or settings.RUN.read(environ)


def path_of(folder: str | Path, rank: int) -> Path:
    """Return a rank's file in a folder."""
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
    pid = os.getpid()
    is_own = error is not None and not isinstance(error, HorovodInternalError)
    content = {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": pid,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        "gtopk": __version__,
        "step": step,
        "operation": operation or None,
        "error": None if error is None else type(error).__name__,
        "text": how if error is None else str(error),
        "lost": [{"rank": each.rank, "why": each.why} for each in lost],
        "traceback": "".join(traceback.format_exception(error)) if is_own else None,
    }
    path = path_of(folder, rank)
    beside = path.with_name(f".{path.name}.{pid}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
