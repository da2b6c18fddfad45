"""A companion's handling of its rank's lines, and of its rank's end, on the test's clock."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gtopk.runtime import standard_streams
from gtopk.runtime.liveness import companion, watchdog
from gtopk.runtime.liveness.companion import Companion, Setting, read_note, write_note
from gtopk.runtime.liveness.watch import BEAT_BYTES, Beat, Peer, State
from gtopk.runtime.liveness.watchdog import Process, read_process

SECRET, TIMEOUT, NOW = bytes(32), 4.0, 50.0
RANK, LAUNCHER = 4711, 77  # pids
RUNS, STOPPED = Process("S", LAUNCHER), Process("T", LAUNCHER)


class CompanionOfRank0:
    """A companion of rank 0 of 3, the ends of its pipes, and its actions on its rank."""

    def __init__(self, stack: ExitStack, launcher: int) -> None:
        self.sockets = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(3)
        ]
        for each in self.sockets:
            each.bind(("127.0.0.1", 0))
            each.settimeout(20)
        self.note = os.memfd_create("note")
        write_note(self.note, 0, "")
        ports = [each.getsockname()[1] for each in self.sockets]
        peers = [Peer(r, f"host{r}", 100 + r, "127.0.0.1", port) for r, port in enumerate(ports)]
        own = os.dup(self.sockets[0].fileno())
        arguments = (0, RANK, launcher, SECRET.hex(), own, self.note, TIMEOUT, 2.0, peers)
        self.setting = Setting(*arguments)
        orders, self.rank_end = os.pipe()
        self.reports, reports = os.pipe()
        for file in (self.note, orders, self.rank_end, self.reports, reports):
            stack.callback(os.close, file)
        self.companion = Companion(self.setting, orders, reports)
        stack.callback(self.companion._socket.close)
        self.kills: list[signal.Signals] = []

    def order(self, text: bytes) -> bool:
        os.write(self.rank_end, text)
        return self.companion._follow_orders()

    def lose(self, rank: int, now: float) -> None:
        self.companion._watch.receive(Beat(rank, rank, State.ENDED, rank, 0.0, "killed"), now)
        self.companion._report(now)

    def received(self, rank: int) -> Beat | None:
        return Beat.decode(self.sockets[rank].recv(BEAT_BYTES), SECRET)

    def receives_nothing(self, rank: int) -> bool:
        readable, _, _ = select.select([self.sockets[rank]], [], [], 0)
        return not readable


@pytest.fixture
def start_companion(monkeypatch) -> Iterator[Callable[..., CompanionOfRank0]]:
    with ExitStack() as stack:

        def make(launcher: int = LAUNCHER) -> CompanionOfRank0:
            made = CompanionOfRank0(stack, launcher)

            def kill(pid: int, how: signal.Signals) -> None:
                assert pid == RANK
                made.kills.append(how)
                raise ProcessLookupError

            monkeypatch.setattr(companion.os, "kill", kill)
            return made

        yield make


def test_setting_survives_round_trip(start_companion) -> None:
    setting = start_companion().setting
    assert Setting.read(setting.line()) == setting
    assert setting.line().endswith(b"\n")


def test_note_replaces_the_last_one_and_its_advice_is_truncated(start_companion) -> None:
    note = start_companion().note
    write_note(note, 1 << 40, "a" + "ü" * 2000)
    assert read_note(note) == (1 << 40, "a" + "ü" * 999 + "\ufffd")
    write_note(note, 7, "in /\udc80")  # a path that is not UTF-8
    assert read_note(note) == (7, "in /?")
    write_note(note, 7, "start it again")
    assert read_note(note) == (7, "start it again")


def test_orders_are_followed_however_the_pipe_splits_them(start_companion) -> None:
    job = start_companion()
    assert not job.companion._follow_orders()
    assert job.order(b"because it fai")
    assert job.companion._end_reason == companion._UNEXPLAINED
    assert job.order(b"led at step 5\nanything else\nlea")
    assert job.companion._end_reason == "it failed at step 5"
    assert not job.companion._leaving
    job.order(b"ve\n")
    assert job.companion._leaving


def test_each_loss_is_reported_once_and_sent_to_the_other_ranks(
    start_companion, monkeypatch
) -> None:
    job = start_companion()
    monkeypatch.setattr(companion.time, "monotonic", lambda: NOW + 3)
    job.lose(2, NOW)
    job.companion._report(NOW + 1)
    assert (
        os.read(job.reports, 1 << 16) == json.dumps({"lost": 2, "why": "killed"}).encode() + b"\n"
    )
    beat = job.received(1)
    assert beat is not None
    assert beat[:3] + beat[4:] == (0, 2, State.LOST, 3.0, "killed")
    job.lose(1, NOW + 2)
    assert json.loads(os.read(job.reports, 1 << 16))["lost"] == 1


def test_loss_of_a_companions_own_rank_is_sent_to_no_other(start_companion) -> None:
    job = start_companion()
    job.companion._watch.receive(Beat(1, 0, State.LOST, 1, 0.0, "silent"), NOW)
    job.companion._report(NOW)
    assert json.loads(os.read(job.reports, 1 << 16))["lost"] == 0
    assert [job.receives_nothing(rank) for rank in range(3)] == [True] * 3


def test_beats_skip_own_rank_and_peers_that_cannot_be_reached(start_companion) -> None:
    job = start_companion()
    own, one, other = job.setting.peers
    peers = [
        own,
        one._replace(address=""),
        other,
        other._replace(rank=3, address="255.255.255.255"),
    ]
    job.companion._setting = job.setting._replace(peers=peers)
    job.companion._send_beat([3, 0, 1, 2], 0, State.ALIVE)
    assert job.received(2).seconds == 0.0
    assert [job.receives_nothing(rank) for rank in range(3)] == [True] * 3


def test_messages_are_printed_once_and_a_closed_stderr_raises_nothing(
    start_companion, monkeypatch, capfd
) -> None:
    job = start_companion()
    job.companion._watch.messages += ["one", "two \udc80"]
    for _ in range(2):
        job.companion._report(NOW)
    assert capfd.readouterr().err == "gtopk: one\ngtopk: two ?\n"

    def closed(*arguments: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(standard_streams.os, "write", closed)
    job.companion._watch.messages.append("three")
    job.lose(2, NOW)


def test_companion_goes_on_when_nobody_reads_its_stderr(start_companion, unread_stderr) -> None:
    job = start_companion()
    job.companion._watch.messages += ["one", "two"]
    assert unread_stderr(lambda: job.companion._report(NOW))
    assert job.companion._watch.messages == []


def test_pending_beats_are_read_before_the_loss_is_printed(start_companion, capfd) -> None:
    job = start_companion()
    lost = Beat(2, 1, State.LOST, 1, 1.0, "x" * 600).encode(SECRET)
    assert len(lost) == BEAT_BYTES
    job.sockets[2].sendto(lost, job.sockets[0].getsockname())
    job.companion._print_loss_for_rank(time.monotonic())
    assert "after rank 1 is lost (xxx" in capfd.readouterr().err


def test_rank_that_does_not_acknowledge_is_killed_after_the_timeout(start_companion, capfd) -> None:
    job = start_companion()
    job.companion._kill_unresponsive_rank(NOW + 9 * TIMEOUT)  # no rank is lost
    job.lose(2, NOW)
    job.lose(1, NOW + 1)
    job.companion._kill_unresponsive_rank(NOW + TIMEOUT)
    assert job.kills == []
    for _ in range(2):
        job.companion._kill_unresponsive_rank(NOW + TIMEOUT + 0.1)
    assert job.kills == [signal.SIGKILL] * 2
    why = "the job is ending (rank 2 (host host2, pid 102): killed) and this rank does not respond"
    assert capfd.readouterr().err == f"gtopk: rank 0 (host host0, pid 100) is ended: {why}\n"
    assert job.companion._end_reason == f"ended by its companion: {why}"


def test_rank_that_has_acknowledged_a_loss_is_not_killed(start_companion) -> None:
    job = start_companion()
    job.lose(2, NOW)
    job.order(b"ack\n")
    job.companion._kill_unresponsive_rank(NOW + 9 * TIMEOUT)
    assert job.kills == []


@pytest.mark.parametrize(("stopped", "lost"), [(NOW, NOW + 1), (NOW + 1, NOW)])
def test_stopped_rank_is_killed_two_seconds_after_the_loss(start_companion, stopped, lost) -> None:
    job = start_companion()
    for what, when in sorted([("stop", stopped), ("lose", lost)], key=lambda each: each[1]):
        if what == "stop":
            job.companion._beat(STOPPED, when)
        else:
            job.lose(2, when)
            job.order(b"ack\n")
    job.lose(1, NOW + 2)  # the first loss counts
    job.companion._beat(STOPPED, NOW + 2)
    job.companion._kill_unresponsive_rank(NOW + 3)
    assert job.kills == []
    job.companion._kill_unresponsive_rank(NOW + 3.1)
    assert job.kills == [signal.SIGKILL]
    assert job.companion._end_reason.endswith("and this rank is stopped")


def test_stopped_rank_that_continues_is_not_killed(start_companion) -> None:
    job = start_companion()
    job.companion._beat(STOPPED, NOW)
    job.lose(2, NOW)
    job.order(b"ack\n")
    job.companion._beat(RUNS, NOW + 1)
    job.companion._kill_unresponsive_rank(NOW + 9)
    assert job.kills == []


@pytest.mark.parametrize(("state", "reported"), [(RUNS, State.ALIVE), (STOPPED, State.STOPPED)])
def test_beat_tells_whether_and_how_long_the_rank_is_stopped(
    start_companion, state, reported
) -> None:
    job = start_companion()
    for seconds in (0.0, 1.0):
        job.companion._beat(state, NOW + seconds)
        beats = [job.received(1), job.received(2)]
        assert beats[0] == beats[1]
        assert (beats[0].about, beats[0].state) == (0, reported)
        assert beats[0].seconds == (seconds if reported is State.STOPPED else 0.0)


@pytest.mark.parametrize(("timeout", "pause"), [(4.0, 0.4), (60.0, 1.0)])
def test_companion_sends_ten_beats_in_a_timeout_and_at_least_one_a_second(
    start_companion, timeout, pause
) -> None:
    job = start_companion()
    orders, reports = os.pipe()
    other = Companion(
        job.setting._replace(socket=os.dup(job.setting.socket), timeout_seconds=timeout),
        orders,
        reports,
    )
    assert other._pause_seconds == pause
    other._socket.close()
    os.close(orders)
    os.close(reports)


def test_silent_rank_is_reported_lost(start_companion) -> None:
    job = start_companion()
    job.companion._watch.receive(Beat(2, 2, State.ALIVE, 1), NOW)
    for number in range(12):
        job.companion._beat(RUNS, NOW + 0.4 * number)
    job.companion._report(NOW + 5)
    assert json.loads(os.read(job.reports, 1 << 16))["lost"] == 2


def test_shared_memory_is_searched_for_with_every_tenth_beat(start_companion, monkeypatch) -> None:
    job, looks = start_companion(), iter(range(9))
    monkeypatch.setattr(companion, "segments_of", lambda pid: {(pid, next(looks))})
    for _ in range(21):
        job.companion._beat(RUNS, NOW)
    assert job.companion._segments == {(RANK, 0), (RANK, 1), (RANK, 2)}


def test_loss_is_sent_again_with_each_beat(start_companion) -> None:
    job = start_companion()
    job.companion._beat(RUNS, NOW)
    assert job.received(1).state is State.ALIVE
    job.lose(2, NOW)
    job.companion._beat(RUNS, NOW)
    assert [job.received(1).state for _ in range(3)] == [State.LOST, State.ALIVE, State.LOST]


def test_rank_whose_launcher_is_gone_gets_sigterm_and_then_sigkill(start_companion, capfd) -> None:
    job = start_companion()
    job.companion._beat(RUNS, NOW)
    assert job.kills == []
    orphan = Process("S", 1)
    for seconds in (0, 3.0):
        job.companion._beat(orphan, NOW + seconds)
    assert job.kills == [signal.SIGTERM]
    job.companion._beat(orphan, NOW + 3.1)
    assert job.kills == [signal.SIGTERM, signal.SIGKILL]
    assert capfd.readouterr().err.count("is ended: its launcher is gone\n") == 1


def test_rank_and_launcher_count_as_alive_where_proc_is_missing(
    start_companion, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(watchdog, "_PROC", str(tmp_path / "proc"))
    shown = read_process(os.getpid())
    assert shown.state
    job = start_companion()
    job.companion._beat(shown, NOW)
    beat = job.received(1)
    assert beat is not None
    assert beat.state is State.ALIVE
    assert job.kills == []


def test_rank_without_a_launcher_is_not_killed_as_orphan(start_companion) -> None:
    job = start_companion(launcher=0)
    for seconds in (0, 9):
        job.companion._beat(Process("S", 1), NOW + seconds)
    assert job.kills == []


def test_removal_of_shared_memory_skips_what_is_already_removed(start_companion, tmp_path) -> None:
    job, there = start_companion(), tmp_path / "there"
    there.touch()
    job.companion._segments = {str(tmp_path / "gone"), str(there)}
    job.companion._remove_segments()
    assert not there.exists()


@pytest.mark.parametrize(
    ("ended", "because", "advice", "prints"),
    [
        (NOW + 1, b"", "start it again", True),
        (NOW + 1, b"", "", True),
        (NOW, b"", "", False),  # may have been the first to end
        (NOW + 1, b"because it failed\n", "", False),  # it could print this itself
    ],
)
def test_companion_prints_the_loss_for_a_rank_that_could_not(
    start_companion, capfd, ended, because, advice, prints
) -> None:
    job = start_companion()
    write_note(job.note, 7, advice)
    job.lose(1, NOW)
    if because:
        job.order(because)
    job.companion._print_loss_for_rank(ended)
    text = (
        "gtopk: rank 0 of 3 (host host0, pid 100) ended without an error message at step 7, after "
        f"rank 1 is lost (killed; host host1, pid 101){'; ' * bool(advice)}{advice}\n"
    )
    assert capfd.readouterr().err == (text if prints else "")


def test_last_beat_is_repeated_with_new_sequence_numbers(start_companion, monkeypatch) -> None:
    job, pauses = start_companion(), []
    monkeypatch.setattr(companion.time, "sleep", pauses.append)
    monkeypatch.setattr(companion.time, "monotonic", lambda: NOW + 3)
    monkeypatch.setattr(companion.time, "monotonic_ns", lambda: 1 << 40)
    job.companion._send_last_beat(State.LEFT, [0, 1], "", NOW)
    job.companion._send_last_beat(State.ENDED, [0, 1, 2], "it failed", NOW)
    assert [job.received(1).state for _ in range(6)] == [State.LEFT] * 3 + [State.ENDED] * 3
    ended = [job.received(2) for _ in range(3)]
    assert [each.sequence - (1 << 40) for each in ended] == [3, 4, 5]
    assert [(each.text, each.seconds) for each in ended] == [("it failed", 3.0)] * 3
    assert pauses == [0.003] * 3 + [0.03] * 3
