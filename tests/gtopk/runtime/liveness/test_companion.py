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


class Beside:
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

    def heard(self, rank: int) -> Beat | None:
        return Beat.decode(self.sockets[rank].recv(BEAT_BYTES), SECRET)

    def hears_nothing(self, rank: int) -> bool:
        readable, _, _ = select.select([self.sockets[rank]], [], [], 0)
        return not readable


@pytest.fixture
def beside(monkeypatch) -> Iterator[Callable[..., Beside]]:
    with ExitStack() as stack:

        def make(launcher: int = LAUNCHER) -> Beside:
            made = Beside(stack, launcher)

            def kill(pid: int, how: signal.Signals) -> None:
                assert pid == RANK
                made.kills.append(how)
                raise ProcessLookupError

            monkeypatch.setattr(companion.os, "kill", kill)
            return made

        yield make


def test_a_setting_arrives_as_it_was_sent(beside) -> None:
    setting = beside().setting
    assert Setting.read(setting.line()) == setting
    assert setting.line().endswith(b"\n")


def test_a_note_is_the_last_one_and_its_advice_is_cut(beside) -> None:
    note = beside().note
    write_note(note, 1 << 40, "a" + "ü" * 2000)
    assert read_note(note) == (1 << 40, "a" + "ü" * 999 + "\ufffd")
    write_note(note, 7, "in /\udc80")  # a path that is not UTF-8
    assert read_note(note) == (7, "in /?")
    write_note(note, 7, "start it again")
    assert read_note(note) == (7, "start it again")


def test_lines_are_followed_however_the_pipe_cuts_them(beside) -> None:
    job = beside()
    assert not job.companion._follow_orders()
    assert job.order(b"because it fai")
    assert job.companion._end_reason == companion._UNEXPLAINED
    assert job.order(b"led at step 5\nanything else\nlea")
    assert job.companion._end_reason == "it failed at step 5"
    assert not job.companion._leaving
    job.order(b"ve\n")
    assert job.companion._leaving


def test_each_loss_is_reported_once_and_the_others_are_told(beside, monkeypatch) -> None:
    job = beside()
    monkeypatch.setattr(companion.time, "monotonic", lambda: NOW + 3)
    job.lose(2, NOW)
    job.companion._report(NOW + 1)
    assert (
        os.read(job.reports, 1 << 16) == json.dumps({"lost": 2, "why": "killed"}).encode() + b"\n"
    )
    said = job.heard(1)
    assert said is not None
    assert said[:3] + said[4:] == (0, 2, State.LOST, 3.0, "killed")
    job.lose(1, NOW + 2)
    assert json.loads(os.read(job.reports, 1 << 16))["lost"] == 1


def test_of_its_own_loss_a_rank_alone_is_told(beside) -> None:
    job = beside()
    job.companion._watch.receive(Beat(1, 0, State.LOST, 1, 0.0, "silent"), NOW)
    job.companion._report(NOW)
    assert json.loads(os.read(job.reports, 1 << 16))["lost"] == 0
    assert [job.hears_nothing(rank) for rank in range(3)] == [True] * 3


def test_beats_go_to_the_others_that_have_an_address_and_whom_the_network_reaches(beside) -> None:
    job = beside()
    own, one, other = job.setting.peers
    peers = [
        own,
        one._replace(address=""),
        other,
        other._replace(rank=3, address="255.255.255.255"),
    ]
    job.companion._setting = job.setting._replace(peers=peers)
    job.companion._send_beat([3, 0, 1, 2], 0, State.ALIVE)
    assert job.heard(2).seconds == 0.0
    assert [job.hears_nothing(rank) for rank in range(3)] == [True] * 3


def test_news_are_printed_once_and_a_closed_terminal_or_pipe_is_no_error(
    beside, monkeypatch, capfd
) -> None:
    job = beside()
    job.companion._watch.messages += ["one", "two \udc80"]
    for _ in range(2):
        job.companion._report(NOW)
    assert capfd.readouterr().err == "gtopk: one\ngtopk: two ?\n"

    def closed(*arguments: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(standard_streams.os, "write", closed)
    job.companion._watch.messages.append("three")
    job.lose(2, NOW)


def test_beats_go_on_where_the_reader_of_stderr_has_stopped(beside, unread_stderr) -> None:
    job = beside()
    job.companion._watch.messages += ["one", "two"]
    assert unread_stderr(lambda: job.companion._report(NOW))
    assert job.companion._watch.messages == []


def test_what_waits_in_the_socket_is_read_before_the_last_word(beside, capfd) -> None:
    job = beside()
    lost = Beat(2, 1, State.LOST, 1, 1.0, "x" * 600).encode(SECRET)
    assert len(lost) == BEAT_BYTES
    job.sockets[2].sendto(lost, job.sockets[0].getsockname())
    job.companion._print_loss_for_rank(time.monotonic())
    assert "after rank 1 is lost (xxx" in capfd.readouterr().err


def test_a_rank_that_does_not_answer_is_killed_after_the_timeout(beside, capfd) -> None:
    job = beside()
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


def test_a_rank_that_has_answered_is_not_killed(beside) -> None:
    job = beside()
    job.lose(2, NOW)
    job.order(b"ack\n")
    job.companion._kill_unresponsive_rank(NOW + 9 * TIMEOUT)
    assert job.kills == []


@pytest.mark.parametrize(("stopped", "lost"), [(NOW, NOW + 1), (NOW + 1, NOW)])
def test_a_stopped_rank_is_killed_two_seconds_after_the_loss(beside, stopped, lost) -> None:
    job = beside()
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


def test_a_rank_that_goes_on_is_not_killed_as_a_stopped_one(beside) -> None:
    job = beside()
    job.companion._beat(STOPPED, NOW)
    job.lose(2, NOW)
    job.order(b"ack\n")
    job.companion._beat(RUNS, NOW + 1)
    job.companion._kill_unresponsive_rank(NOW + 9)
    assert job.kills == []


@pytest.mark.parametrize(("state", "said"), [(RUNS, State.ALIVE), (STOPPED, State.STOPPED)])
def test_a_beat_says_whether_the_rank_is_stopped_and_since_when(beside, state, said) -> None:
    job = beside()
    for seconds in (0.0, 1.0):
        job.companion._beat(state, NOW + seconds)
        beats = [job.heard(1), job.heard(2)]
        assert beats[0] == beats[1]
        assert (beats[0].about, beats[0].state) == (0, said)
        assert beats[0].seconds == (seconds if said is State.STOPPED else 0.0)


@pytest.mark.parametrize(("timeout", "pause"), [(4.0, 0.4), (60.0, 1.0)])
def test_ten_beats_are_sent_in_a_timeout_and_one_a_second_at_least(beside, timeout, pause) -> None:
    job = beside()
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


def test_a_silent_rank_is_lost_by_the_beats_of_this_one(beside) -> None:
    job = beside()
    job.companion._watch.receive(Beat(2, 2, State.ALIVE, 1), NOW)
    for number in range(12):
        job.companion._beat(RUNS, NOW + 0.4 * number)
    job.companion._report(NOW + 5)
    assert json.loads(os.read(job.reports, 1 << 16))["lost"] == 2


def test_shared_memory_is_looked_for_with_every_tenth_beat(beside, monkeypatch) -> None:
    job, looks = beside(), iter(range(9))
    monkeypatch.setattr(companion, "segments_of", lambda pid: {(pid, next(looks))})
    for _ in range(21):
        job.companion._beat(RUNS, NOW)
    assert job.companion._segments == {(RANK, 0), (RANK, 1), (RANK, 2)}


def test_a_loss_is_told_again_with_each_beat(beside) -> None:
    job = beside()
    job.companion._beat(RUNS, NOW)
    assert job.heard(1).state is State.ALIVE
    job.lose(2, NOW)
    job.companion._beat(RUNS, NOW)
    assert [job.heard(1).state for _ in range(3)] == [State.LOST, State.ALIVE, State.LOST]


def test_a_rank_whose_launcher_is_gone_is_asked_to_end_and_then_killed(beside, capfd) -> None:
    job = beside()
    job.companion._beat(RUNS, NOW)
    assert job.kills == []
    orphan = Process("S", 1)
    for seconds in (0, 3.0):
        job.companion._beat(orphan, NOW + seconds)
    assert job.kills == [signal.SIGTERM]
    job.companion._beat(orphan, NOW + 3.1)
    assert job.kills == [signal.SIGTERM, signal.SIGKILL]
    assert capfd.readouterr().err.count("is ended: its launcher is gone\n") == 1


def test_off_linux_a_rank_has_not_ended_nor_is_its_launcher_gone(
    beside, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(watchdog, "_PROC", str(tmp_path / "proc"))
    shown = read_process(os.getpid())
    assert shown.state
    job = beside()
    job.companion._beat(shown, NOW)
    said = job.heard(1)
    assert said is not None
    assert said.state is State.ALIVE
    assert job.kills == []


def test_without_a_launcher_none_is_missed(beside) -> None:
    job = beside(launcher=0)
    for seconds in (0, 9):
        job.companion._beat(Process("S", 1), NOW + seconds)
    assert job.kills == []


def test_shared_memory_that_another_companion_removed_is_passed_over(beside, tmp_path) -> None:
    job, there = beside(), tmp_path / "there"
    there.touch()
    job.companion._segments = {str(tmp_path / "gone"), str(there)}
    job.companion._remove_segments()
    assert not there.exists()


@pytest.mark.parametrize(
    ("ended", "because", "advice", "speaks"),
    [
        (NOW + 1, b"", "start it again", True),
        (NOW + 1, b"", "", True),
        (NOW, b"", "", False),  # may have been the first to end
        (NOW + 1, b"because it failed\n", "", False),  # it could print this itself
    ],
)
def test_who_could_not_print_why_it_ended_is_spoken_for(
    beside, capfd, ended, because, advice, speaks
) -> None:
    job = beside()
    write_note(job.note, 7, advice)
    job.lose(1, NOW)
    if because:
        job.order(because)
    job.companion._print_loss_for_rank(ended)
    text = (
        "gtopk: rank 0 of 3 (host host0, pid 100) ended without an error message at step 7, after "
        f"rank 1 is lost (killed; host host1, pid 101){'; ' * bool(advice)}{advice}\n"
    )
    assert capfd.readouterr().err == (text if speaks else "")


def test_the_last_beat_is_repeated_each_with_a_number_of_its_own(beside, monkeypatch) -> None:
    job, pauses = beside(), []
    monkeypatch.setattr(companion.time, "sleep", pauses.append)
    monkeypatch.setattr(companion.time, "monotonic", lambda: NOW + 3)
    monkeypatch.setattr(companion.time, "monotonic_ns", lambda: 1 << 40)
    job.companion._send_last_beat(State.LEFT, [0, 1], "", NOW)
    job.companion._send_last_beat(State.ENDED, [0, 1, 2], "it failed", NOW)
    assert [job.heard(1).state for _ in range(6)] == [State.LEFT] * 3 + [State.ENDED] * 3
    ended = [job.heard(2) for _ in range(3)]
    assert [each.sequence - (1 << 40) for each in ended] == [3, 4, 5]
    assert [(each.text, each.seconds) for each in ended] == [("it failed", 3.0)] * 3
    assert pauses == [0.003] * 3 + [0.03] * 3
