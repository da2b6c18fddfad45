"""The failure file: what a rank failed with, for who looks when the job's output is gone.

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
import os
import re
import socket
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from collectives.errors import PeerError

from ... import __version__, settings
from ...errors import HorovodInternalError
from ..launch.watchdog import now, write_record
from ..liveness.heartbeat import Lost

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
