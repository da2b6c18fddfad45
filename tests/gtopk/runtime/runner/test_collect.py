"""From all ranks' reports, the error shows the cause."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gtopk.errors import HorovodInternalError
from gtopk.runtime.launch import LaunchError
from gtopk.runtime.runner import RankError, call
from gtopk.runtime.runner.call import error_report, result_report
from gtopk.runtime.runner.call_server import CallServer


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CAUSE_SECONDS", "_DRAIN_SECONDS", "_END_SECONDS", "_LEAVE_SECONDS"):
        monkeypatch.setattr(call, name, 0.05)


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def ended() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    process.wait()
    return process


def outcome(
    launcher: subprocess.Popen[bytes],
    ranks: int,
    reports: dict[int, bytes],
    left: tuple[int, ...] = (),
    connected: range | None = None,
    start_seconds: float = 60,
) -> list[Any]:
    """Collect from a server on which all these events have happened."""
    server = CallServer(ranks, [])
    server.close()
    server.connected, server.disconnected, server.reports = (
        set(connected or range(ranks)),
        [*reports, *left],
        reports,
    )
    return call.collect(server, launcher, ranks, start_seconds, allow_pickle=False)


def raised(error: BaseException) -> bytes:
    try:
        raise error
    except BaseException as caught:
        return error_report(caught, own_frames=0)


def result(value: object) -> bytes:
    return result_report(value, allow_pickle=False)


def test_results_are_in_rank_order(ended) -> None:
    assert outcome(ended, 3, {rank: result(rank * 10) for rank in (2, 0, 1)}) == [0, 10, 20]


def test_collect_does_not_wait_for_reported_ranks_that_do_not_exit(running, capsys) -> None:
    assert outcome(running, 1, {0: result(None)}) == [None]
    assert "do not exit" in capsys.readouterr().err


def test_error_shows_the_cause_and_not_its_consequences(running) -> None:
    reports = {
        0: raised(HorovodInternalError("rank 2 has left")),
        2: raised(KeyError("cause")),
        1: result(1),
    }
    with pytest.raises(RankError, match=r"rank 2 of 3 .* raised KeyError: 'cause'") as caught:
        outcome(running, 3, reports)
    assert caught.value.rank == 2
    assert "in raised" in caught.value.traceback
    assert str(caught.value).endswith(caught.value.traceback.rstrip())


def test_rank_without_a_report_is_the_cause_of_the_others_errors(ended) -> None:
    reports = {0: raised(HorovodInternalError("rank 1 is gone"))}
    with pytest.raises(
        RankError, match=r"rank 1 of 3 ended without a report .*, and then rank 2; .* code 9"
    ):
        outcome(ended, 3, reports, left=(1, 2))


def test_first_consequence_is_raised_when_no_report_has_the_cause(running) -> None:
    reports = {rank: raised(HorovodInternalError("they disagree")) for rank in range(2)}
    with pytest.raises(RankError, match=r"rank 0 of 2 .* HorovodInternalError: they disagree"):
        outcome(running, 2, reports)


def test_error_says_that_a_rank_called_sys_exit(ended) -> None:
    with pytest.raises(RankError, match=r"called sys.exit\(3\) and returned no result"):
        outcome(ended, 1, {0: raised(SystemExit(3))})


def test_error_names_ranks_that_do_not_begin(running, ended) -> None:
    with pytest.raises(LaunchError, match=r"within 0.1 s \(start_timeout\); ranks 1, 2 did not"):
        outcome(running, 3, {}, connected=range(1), start_seconds=0.1)
    with pytest.raises(LaunchError, match="rank 1 of 2 did not begin; its launcher ended"):
        outcome(ended, 2, {0: result(None)}, connected=range(1))


def test_exception_without_a_text_is_named_by_its_type() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            return ""

    launcher = SimpleNamespace(poll=lambda: 0, wait=lambda seconds: 0)
    with pytest.raises(RankError, match=r"raised Mute\n"):
        outcome(launcher, 1, {0: raised(Mute())})  # type: ignore[arg-type]
