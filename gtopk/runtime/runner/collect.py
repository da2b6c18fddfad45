"""Collecting: every rank's result, or the one error that says which rank failed, and how.

A rank that lost its peers says so at once, the one that they lost perhaps a little later: the cause
is waited for, and told.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from ...errors import RankError
from ..coordinator.agreement import name_ranks
from ..launch import LaunchError
from . import report
from .desk import Desk

_LOOK_SECONDS: Final = 0.1  # between two looks whether the launcher has ended
_CAUSE_SECONDS: Final = 5.0  # what the cause gets to be reported, after a consequence was
_LEAVE_SECONDS: Final = 2.0  # what ranks get to end, after one has failed
_DRAIN_SECONDS: Final = 2.0  # what reports get to arrive, after the launcher has ended
_END_SECONDS: Final = 30.0  # what ranks get to end, after they have reported


def collect(
    desk: Desk,
    launcher: subprocess.Popen[bytes],
    ranks: int,
    start_seconds: float,
    allow_pickle: bool,
) -> list[Any]:
    """Return the results in rank order, when all ranks have reported one and ended.

    Raises RankError for the first rank that failed or was lost, LaunchError where a rank has not
    begun start_seconds after the first call, or when the launcher ended without it.
    """
    results: dict[int, Any] = {}
    failures: dict[int, report.Failure] = {}
    begun = time.monotonic()
    ended: float | None = None  # since when the launcher has ended
    failed: float | None = None  # since when a rank has failed or is lost
    while len(results) < ranks:
        with desk.changed:
            desk.changed.wait(_LOOK_SECONDS)
            new = {r: c for r, c in desk.reports.items() if r not in results and r not in failures}
            lost = [rank for rank in desk.left if rank not in desk.reports]
            absent = sorted(set(range(ranks)) - desk.came)
        for rank, content in new.items():
            result, failure = report.read(content, allow_pickle)
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
            _let_end(launcher, _LEAVE_SECONDS)
            raise _of_failure(causes[0], ranks, failures[causes[0]])
        if (ended and now > ended + _DRAIN_SECONDS) or (failed and now > failed + _CAUSE_SECONDS):
            raise _without_cause(failures, lost, absent, ranks, launcher)
        if absent and now > begun + start_seconds:
            raise LaunchError(
                f"all {ranks} ranks must begin within {start_seconds:g} s (start_timeout); "
                f"{name_ranks(absent)} did not"
            )
    if not _let_end(launcher, _END_SECONDS):
        print("gtopk.run: ranks that have reported do not end, and are ended", file=sys.stderr)
    return [results[rank] for rank in range(ranks)]


def _let_end(launcher: subprocess.Popen[bytes], seconds: float) -> bool:
    """Give the ranks time to end by themselves, which is quieter; tell whether they have."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)
    return launcher.poll() is not None


def _of_failure(rank: int, ranks: int, failure: report.Failure) -> RankError:
    return RankError(
        rank, f"rank {rank} of {ranks} ({failure.place}) {failure.what}", failure.traceback
    )


def _without_cause(
    failures: dict[int, report.Failure],
    lost: Sequence[int],
    absent: list[int],
    ranks: int,
    launcher: subprocess.Popen[bytes],
) -> RuntimeError:
    """Return the error for a job of which no rank told of a cause."""
    code = launcher.poll()
    end = "its launcher goes on" if code is None else f"its launcher ended with exit code {code}"
    if lost:
        return RankError(
            lost[0],
            f"rank {lost[0]} of {ranks} ended without a report (killed, or out of memory?); {end}",
        )
    if failures:
        first = min(failures)
        return _of_failure(first, ranks, failures[first])
    return LaunchError(f"{name_ranks(absent)} of {ranks} did not begin; {end}")
