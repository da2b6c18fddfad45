"""Companion: the process beside a rank that sends beats for it, and watches the other ranks.

heartbeat.py starts it with only the standard library. It and the rank exchange lines:

    rank -> companion    {"rank": 0, "parent": 4711, ...}   the first line: its setting, as JSON
                         ack                                the rank knows of all losses so far
                         because TEXT                       why the rank is about to end
                         leave                              the rank leaves without a failure
    companion -> rank    {"lost": 2, "why": "..."}          a rank is lost

It ends a moment after its rank, so that it can tell the others why the rank ended. If the job is
ending and its rank is stopped or does not respond, the companion kills the rank, as nothing else
may do so soon. Some launchers, such as MPICH's, kill the rank as soon as another one is lost. Then
the companion reports that loss for the rank, and removes the shared memory that MPICH leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import time
from typing import Final, NamedTuple

from ..standard_streams import write_line
from .watch import BEAT_BYTES, Beat, Peer, State, Watch
from .watchdog import Process, read_process

_LONGEST_PAUSE_SECONDS: Final = 1.0  # between beats
_BEATS_PER_TIMEOUT: Final = 10
# Seconds between repetitions of the last beat, as UDP may lose one. Shorter for LEFT: a leaving
# rank waits for its companion.
_REPEAT_SECONDS: Final = {State.ENDED: 0.03, State.LEFT: 0.003}
_LAST_BEAT_COUNT: Final = 3
_ORDER_SECONDS: Final = 0.0002  # the smallest difference that shows which of two ranks ended first
_UNEXPLAINED: Final = "ended without an error message"
# MPICH's shared memory, which only MPI_Finalize removes. MPICH maps it at MPI's start, or for a
# window.
_SEGMENTS: Final = "/dev/shm/mpich_shm_"
_BEATS_PER_SCAN: Final = 10  # beats between two searches for segments
_NOTE: Final = struct.Struct("<qI")  # the step, and the length of the advice in bytes
_ADVICE_BYTES: Final = 2000
_MAX_DATAGRAMS: Final = 1000  # most datagrams to receive before the next beat, in case of a flood
_STOPPED_GRACE_SECONDS: Final = 2.0  # for a stopped rank to continue once the job is ending
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_LAUNCHER_GRACE_SECONDS: Final = 3.0  # for a rank to end by itself once its launcher is gone


class Setting(NamedTuple):
    """The setting that a companion is started with.

    parent:   the rank's pid.
    launcher: the pid of the process that started the rank, if the rank must end with it; else 0.
    secret:   the job's secret, in hexadecimal digits.
    socket:   the descriptor of the bound UDP socket.
    note:     the descriptor of a memory file with the rank's step and advice (`read_note`).
    """

    rank: int
    parent: int
    launcher: int
    secret: str
    socket: int
    note: int
    timeout_seconds: float
    warning_seconds: float
    peers: list[Peer]

    @classmethod
    def read(cls, line: bytes) -> Setting:
        """Parse a line made by `line`."""
        values = json.loads(line)
        return cls(**{**values, "peers": [Peer(*peer) for peer in values["peers"]]})

    def line(self) -> bytes:
        """Return the setting as a line of JSON."""
        return json.dumps(self._asdict()).encode() + b"\n"


def segments_of(pid: int) -> set[str]:
    """Return the files of MPICH shared memory that a process has mapped."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return {line[line.index("/") :].rstrip() for line in maps if _SEGMENTS in line}
    except OSError:
        return set()


def write_note(file: int, step: int, advice: str) -> None:
    """Write a rank's step, and the advice on how to continue the job, for `read_note`."""
    text = advice.encode(errors="replace")[:_ADVICE_BYTES]
    os.pwrite(file, _NOTE.pack(step, len(text)) + text, 0)


def read_note(file: int) -> tuple[int, str]:
    """Return a rank's step, and the advice on how to continue the job."""
    content = os.pread(file, _NOTE.size + _ADVICE_BYTES, 0)
    step, size = _NOTE.unpack_from(content)
    return step, content[_NOTE.size :][:size].decode(errors="replace")


class Companion:
    """Sends and receives beats, and watches its rank until the rank leaves or ends."""

    def __init__(self, setting: Setting, orders: int, reports: int) -> None:
        self._setting = setting
        self._secret = bytes.fromhex(setting.secret)
        self._own = setting.peers[setting.rank]
        self._all_ranks = [peer.rank for peer in setting.peers]
        self._watch = Watch(
            setting.rank,
            setting.peers,
            setting.timeout_seconds,
            setting.warning_seconds,
            time.monotonic(),
        )
        self._socket = socket.socket(fileno=setting.socket)
        self._socket.setblocking(False)
        self._orders, self._reports = orders, reports
        os.set_blocking(orders, False)
        self._order_buffer = b""
        self._sequence = 0
        self._reported_losses = 0  # how many losses the rank has been sent
        self._lost_since = 0.0  # time of the first loss
        self._unanswered_since: float | None = None  # since when the rank has not answered
        self._stopped_since: float | None = None
        self._launcher_gone_since: float | None = None
        self._end_reason = _UNEXPLAINED
        self._beats = 0
        self._segments: set[str] = set()
        self._leaving = self._ending = False
        self._pause_seconds = min(
            _LONGEST_PAUSE_SECONDS, setting.timeout_seconds / _BEATS_PER_TIMEOUT
        )

    def run(self) -> None:
        """Run until the rank has left or ended and the others have been told."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._orders, selectors.EVENT_READ)
            # Without pidfd_open, the rank's end is noticed at the next beat.
            with contextlib.suppress(OSError, AttributeError):
                selector.register(os.pidfd_open(self._setting.parent), selectors.EVENT_READ)
            next_beat = 0.0
            while not self._leaving:
                now = time.monotonic()
                process = read_process(self._setting.parent)
                # Adopted by another process, or child of a zombie: the rank has ended.
                if os.getppid() != self._setting.parent or not process.state:
                    while self._follow_orders():  # its last messages
                        pass
                    self._send_last_beat(State.ENDED, self._all_ranks, self._end_reason, now)
                    self._print_loss_for_rank(now)
                    self._remove_segments()
                    return
                if now >= next_beat:
                    next_beat = now + self._pause_seconds
                    self._beat(process, now)
                self._report(now)
                self._kill_unresponsive_rank(now)
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if key.fileobj is self._socket:
                        self._receive_beats()
                    # A pipe at end of file is always readable: `select` would spin.
                    elif key.fileobj == self._orders and not self._follow_orders():
                        selector.unregister(self._orders)
        self._send_last_beat(State.LEFT, self._watch.targets, "", time.monotonic())

    def _remove_segments(self) -> None:
        """Remove the shared memory's names; processes that have it mapped keep it."""
        for path in self._segments:
            with contextlib.suppress(OSError):  # another rank's companion was first
                os.unlink(path)

    def _beat(self, process: Process, now: float) -> None:
        # While the rank lives: /proc shows no maps of an ended process.
        if self._beats % _BEATS_PER_SCAN == 0:
            self._segments |= segments_of(self._setting.parent)
        self._beats += 1
        is_stopped = process.state in "Tt"
        if not is_stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        self._watch.check_timeouts(now, is_stopped)
        seconds = now - (self._stopped_since or now)
        state = State.STOPPED if is_stopped else State.ALIVE
        self._send_beat(self._watch.targets, self._setting.rank, state, seconds=seconds)
        for rank, why in self._watch.lost.items():
            self._forward_loss(self._watch.targets, rank, why)
        self._check_launcher(process, now)

    def _report(self, now: float) -> None:
        """Print the watch's messages, and report new losses to the rank and the other ranks."""
        if messages := self._watch.messages:
            # One write, so that a blocked reader costs one wait.
            write_line("\ngtopk: ".join(messages))
            messages.clear()
        lost = list(self._watch.lost.items())
        for rank, why in lost[self._reported_losses :]:
            self._reported_losses += 1
            self._lost_since = self._lost_since or now
            self._unanswered_since = self._unanswered_since or now
            self._forward_loss(self._all_ranks, rank, why)
            report = json.dumps({"lost": rank, "why": why}).encode() + b"\n"
            with contextlib.suppress(OSError):  # the rank has just ended
                os.write(self._reports, report)

    def _kill_unresponsive_rank(self, now: float) -> None:
        """Kill the rank if the job is ending and the rank is stopped or does not answer."""
        if not self._reported_losses:
            return
        stopped, unanswered = self._stopped_since, self._unanswered_since
        rank, why = next(iter(self._watch.lost.items()))
        reason = f"the job is ending ({self._setting.peers[rank]}: {why}) and this rank"
        if stopped and now - max(stopped, self._lost_since) > _STOPPED_GRACE_SECONDS:
            self._signal_rank(signal.SIGKILL, f"{reason} is stopped")
        elif unanswered and now - unanswered > self._setting.timeout_seconds:
            self._signal_rank(signal.SIGKILL, f"{reason} does not respond")

    def _check_launcher(self, process: Process, now: float) -> None:
        if not self._setting.launcher or process.parent in (0, self._setting.launcher):
            return
        if self._launcher_gone_since is None:
            self._launcher_gone_since = now
            self._signal_rank(signal.SIGTERM, "its launcher is gone")
        elif now - self._launcher_gone_since > _LAUNCHER_GRACE_SECONDS:
            self._signal_rank(signal.SIGKILL, "its launcher is gone")

    def _signal_rank(self, how: signal.Signals, why: str) -> None:
        if not self._ending:
            self._ending = True
            self._end_reason = f"ended by its companion: {why}"
            write_line(f"{self._own} is ended: {why}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._setting.parent, how)

    def _send_beat(
        self, ranks: list[int], about: int, state: State, text: str = "", seconds: float = 0.0
    ) -> None:
        # From the clock, so that a replacement of this companion has higher numbers.
        self._sequence = max(self._sequence + 1, time.monotonic_ns())
        beat = Beat(self._setting.rank, about, state, self._sequence, seconds, text)
        datagram = beat.encode(self._secret)
        for rank in ranks:
            peer = self._setting.peers[rank]
            if rank != self._setting.rank and peer.address:
                with contextlib.suppress(OSError):  # the network is down: the others will notice
                    self._socket.sendto(datagram, (peer.address, peer.port))

    def _forward_loss(self, ranks: list[int], lost: int, why: str) -> None:
        if lost != self._setting.rank:
            seconds_ago = time.monotonic() - self._watch.lost_at[lost]
            self._send_beat(ranks, lost, State.LOST, why, seconds_ago)

    def _send_last_beat(self, state: State, ranks: list[int], text: str, since: float) -> None:
        for _ in range(_LAST_BEAT_COUNT):
            self._send_beat(ranks, self._setting.rank, state, text, time.monotonic() - since)
            time.sleep(_REPEAT_SECONDS[state])

    def _print_loss_for_rank(self, ended: float) -> None:
        """Print which rank was lost before this one ended, if this one could not print it."""
        # The beat about a loss may still be in the socket.
        self._receive_beats()
        lost = self._watch.lost_before(ended - _ORDER_SECONDS)
        if self._end_reason != _UNEXPLAINED or lost is None:
            return
        own, other = self._own, self._setting.peers[lost]
        step, advice = read_note(self._setting.note)
        write_line(
            f"rank {own.rank} of {len(self._all_ranks)} (host {own.host}, pid {own.pid}) "
            f"{_UNEXPLAINED} at step {step}, after rank {lost} is lost "
            f"({self._watch.lost[lost]}; host {other.host}, pid {other.pid})"
            + (f"; {advice}" if advice else "")
        )

    def _receive_beats(self) -> None:
        for _ in range(_MAX_DATAGRAMS):
            try:
                # Read one byte more than a beat, so that a longer datagram is not mistaken for one.
                datagram = self._socket.recv(BEAT_BYTES + 1)
            except OSError:  # the socket is empty, or an earlier beat found no receiver
                return
            if beat := Beat.decode(datagram, self._secret):
                self._watch.receive(beat, time.monotonic())

    def _follow_orders(self) -> bool:
        """Read and follow the rank's lines; return whether there were any."""
        try:
            received = os.read(self._orders, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._order_buffer = (self._order_buffer + received).split(b"\n")
        for line in lines:
            order, _, text = line.decode(errors="replace").partition(" ")
            if order == "ack":
                self._unanswered_since = None
            elif order == "because":
                self._end_reason = text
            elif order == "leave":
                self._leaving = True
        return bool(received)


def _continue_when_parent_ends() -> None:
    """Ask the kernel to continue this process, if it is stopped, when its parent ends.

    A stopped companion would keep the launcher's pipes open, and mpirun would never return.
    """
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))


def main() -> None:
    """Run the companion of the process that started this one."""
    _continue_when_parent_ends()
    # A launcher may signal the whole session; the companion must still tell the others.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0) as orders:  # unbuffered: later lines stay in the pipe
        if line := orders.readline():
            Companion(Setting.read(line), orders.fileno(), reports=1).run()
