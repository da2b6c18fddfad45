"""The other ranks learn of every failure of a rank, by its name, without false alarms."""

from __future__ import annotations

import io
import mmap
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.transports import local_world
from gtopk.runtime.liveness.companion import read_note, segments_of
from gtopk.runtime.liveness.heartbeat import Heartbeat
from gtopk.runtime.liveness.watch import Beat, State
from gtopk.runtime.liveness.watchdog import read_process
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[4]
TIMEOUT = 1.2
LONG_TIMEOUT = 2.5  # long, so that no rank counts as lost on a busy machine


class Ranks:
    """Ranks of beats.py, with the output of them and their companions."""

    def __init__(self, process: subprocess.Popen[str], size: int) -> None:
        self.process = process
        self.lines: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.pids, self.companions, self.ports = {}, {}, {}
        for _ in range(size):
            match = self.wait_for_line(r"rank (\d) is (\d+) beside (\d+) at (\d+)")
            self.pids[int(match[1])] = int(match[2])
            self.companions[int(match[1])] = int(match[3])
            self.ports[int(match[1])] = int(match[4])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Return the next line that matches; fail if none comes."""
        while True:
            line = self._lines.get(timeout=20)
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match

    def wait(self, seconds: float) -> None:
        """Collect output for some seconds."""
        time.sleep(seconds)
        while not self._lines.empty():
            self.lines.append(self._lines.get())

    def order(self, rank: int, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rank} {what}\n")
        self.process.stdin.flush()

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def losses(self) -> list[str]:
        return [line for line in self.lines if " lost " in line]


@contextmanager
def ranks(size: int, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    process = subprocess.Popen(
        [sys.executable, ROOT / "tests/programs/beats.py", str(size), str(timeout)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
    )
    with process:
        started = Ranks(process, size)
        try:
            yield started
        finally:
            for rank in range(size):
                if read_process(started.pids[rank]).parent == process.pid:
                    started.send(rank, signal.SIGKILL)
            process.wait(20)
            started.reader.join(20)  # companions may print last
    deadline = time.monotonic() + 10
    while any(read_process(pid).state for pid in started.companions.values()):
        assert time.monotonic() < deadline, "a companion outlives its rank"
        time.sleep(0.01)


def test_stopped_rank_is_reported_lost_and_ended_by_its_companion():
    with ranks(3) as job:
        job.send(1, signal.SIGSTOP)
        job.wait_for_line(
            rf"gtopk: rank 1 \(host .*, pid {job.pids[1]}\): stopped for 0\.\d s .* the job ends"
        )
        for _ in range(2):
            lost = job.wait_for_line(
                r"rank (\d) lost 1: stopped for 1\.\d s .*; host \S+, pid (\d+)"
            )
            assert lost[1] in "02"
            assert int(lost[2]) == job.pids[1]
        job.wait_for_line(rf"{job.pids[1]} ended with -9")
        assert not [line for line in job.losses() if "lost 0" in line or "lost 2" in line]


def ignores_sigterm(pid: int) -> bool:
    """Tell whether a companion has started; it first ignores SIGTERM."""
    ignored = re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(ignored and int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_companion_that_is_stopped_with_its_rank_ends_with_it():
    with ranks(3) as job:
        companion, deadline = job.companions[1], time.monotonic() + 20
        while not ignores_sigterm(companion):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(companion, signal.SIGSTOP)
        job.send(1, signal.SIGSTOP)
        job.send(1, signal.SIGKILL)  # as the launcher does
        while read_process(companion).state:
            assert time.monotonic() < deadline, "it is still stopped, and holds pipes"
            time.sleep(0.01)


def test_disturbances_shorter_than_the_timeout_lose_no_rank():
    """A stop, a long-held GIL, a killed companion, foreign datagrams, and a departing rank."""
    with (
        ranks(3, LONG_TIMEOUT) as job,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        forged = Beat(1, 1, State.ENDED, 1 << 62, 0.0, "says a stranger").encode(bytes(32))
        for _ in range(2000):
            for port in job.ports.values():
                stranger.sendto(forged, ("127.0.0.1", port))
                stranger.sendto(os.urandom(1000), ("127.0.0.1", port))
        job.order(0, f"hold {1.4 * LONG_TIMEOUT}")
        job.send(1, signal.SIGSTOP)
        job.wait_for_line("rank 1 .*: stopped for")
        job.send(1, signal.SIGCONT)
        job.wait_for_line("rank 1 .* responds again")
        os.kill(job.companions[2], signal.SIGKILL)
        job.wait_for_line(r"rank 2 .*: its companion was ended \(-9\); starting another")
        job.wait(1.2 * LONG_TIMEOUT)
        job.order(1, "leave")
        job.wait_for_line(f"{job.pids[1]} ended with 0")
        job.wait(1.2 * LONG_TIMEOUT)
        assert job.losses() == []


def test_rank_that_ends_is_lost_at_once_with_its_explanation():
    with ranks(3, timeout=60) as job:
        job.order(1, "fail failed at step 5: RuntimeError: boom")
        for _ in range(2):
            job.wait_for_line(
                r"rank [02] lost 1: failed at step 5: RuntimeError: boom; "
                rf"host \S+, pid {job.pids[1]}"
            )
        job.send(2, signal.SIGKILL)
        job.wait_for_line(r"rank 0 lost 2: ended without an error message; host")


def test_companion_explains_a_rank_that_is_killed_after_another_was():
    """As with MPICH's mpirun, which sends SIGKILL within milliseconds."""
    with ranks(3, timeout=60) as job:
        job.order(0, "step 7")
        job.wait_for_line("rank 0 is at step 7")
        job.send(1, signal.SIGKILL)
        job.wait_for_line("rank 0 lost 1")
        job.send(0, signal.SIGKILL)
        line = job.wait_for_line(r"gtopk: (rank \d .*)")[1]
        assert re.fullmatch(
            rf"rank 0 of 3 \(host \S+, pid {job.pids[0]}\) ended without an error message at "
            r"step 7, after rank 1 is lost \(ended without an error message; host \S+, pid "
            rf"{job.pids[1]}\); "
            "start it again",
            line,
        )
        job.order(2, "fail by itself")  # and has reported why
        job.wait_for_line(f"{job.pids[2]} ended with 1")
    job.wait(0.2)
    assert not [line for line in job.lines if re.search("gtopk: rank [12] of 3", line)]


@pytest.mark.parametrize("system", ["Linux", "another"])
def test_close_waits_for_the_companion_and_closes_all_files(system, monkeypatch):
    if system == "another":
        monkeypatch.delattr(os, "memfd_create")
    heartbeat = Heartbeat(local_world(1)[0], 60.0, 30.0, launcher=0)
    heartbeat.start([heartbeat.introduction])
    companion, own, note = heartbeat._companion, heartbeat._socket, heartbeat._note_file
    assert companion is not None
    heartbeat.note(5, "go on")
    assert read_note(note) == (5, "go on")
    assert os.fstat(note).st_nlink == 0
    heartbeat.close()
    assert companion.returncode is not None
    assert own.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(note)
    heartbeat.note(7, "too late")  # must not raise
    assert heartbeat.lost() is None


def test_rank_is_watched_before_its_companion_runs(monkeypatch):
    """A host that is lost in between has said that it was there."""
    both = [Heartbeat(transport, TIMEOUT, TIMEOUT, launcher=0) for transport in local_world(2)]
    introductions = [each.introduction for each in both]
    monkeypatch.setattr(Heartbeat, "_launch", lambda self: None)
    monkeypatch.setattr(Heartbeat, "_receive_losses", lambda self, companion: None)
    for each in both:
        each.start(introductions)
    for rank, each in enumerate(both):
        beat = Beat.decode(each._socket.recv(1000), bytes.fromhex(each._setting.secret))
        assert (beat.sender, beat.about, beat.state) == (1 - rank, 1 - rank, State.ALIVE)
        each.close()


def test_companion_that_ends_while_its_rank_leaves_is_not_replaced():
    heartbeat = Heartbeat(local_world(1)[0], TIMEOUT, TIMEOUT, launcher=0)
    heartbeat._setting = SimpleNamespace(peers=["rank 0"])
    others: list[str] = []
    heartbeat._launch = lambda: others.append("another")
    # The rank leaves, and closes the companion's socket, while learning that it has ended.
    ended = SimpleNamespace(stdout=io.BytesIO(), returncode=-9, wait=heartbeat.close)
    heartbeat._receive_losses(ended)
    assert others == []


def test_signal_handler_may_explain_while_another_order_is_written(monkeypatch):
    reads, writes = os.pipe()
    heartbeat = Heartbeat(local_world(1)[0], TIMEOUT, TIMEOUT, launcher=0)
    write = os.write

    def interrupted(descriptor: int, text: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGUSR1)
        return write(descriptor, text)

    def explain(number: int, frame: object) -> None:
        assert heartbeat.lost(wait_seconds=0.0) is None
        heartbeat.explain("stopped")

    with os.fdopen(reads, "rb") as orders, os.fdopen(writes, "wb") as stdin:
        heartbeat._companion = SimpleNamespace(stdin=stdin)
        before = signal.signal(signal.SIGUSR1, explain)
        try:
            monkeypatch.setattr(os, "write", interrupted)
            heartbeat.explain("failed")
        finally:
            signal.signal(signal.SIGUSR1, before)
        stdin.close()
        assert orders.read().splitlines() == [b"because stopped", b"because failed"]
        heartbeat._companion = None
        heartbeat.close()


def test_segments_of_finds_mpichs_shared_memory_by_its_name():
    with tempfile.NamedTemporaryFile(prefix="mpich_shm_", dir="/dev/shm") as file:
        file.truncate(10)
        assert segments_of(os.getpid()) == set()
        with mmap.mmap(file.fileno(), 10):
            assert segments_of(os.getpid()) == {file.name}
    assert segments_of(os.getpid()) == set()
    assert segments_of(1 << 30) == set()
