"""Heartbeat: the rank's side. It starts the companion and receives reports of lost ranks from it.

Companions on other hosts reach this one at the address that `choose_address` returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ... import settings
from .companion import Setting, write_note
from .watch import Beat, Peer, State, distances
from .watchdog import command_of

# `collectives` needs NumPy; `gtopk doctor` must choose an address even if NumPy is broken.
if TYPE_CHECKING:
    from collectives.transports import Transport

_LEAVE_SECONDS: Final = 2.0  # for a companion to announce the departure
_POLL_SECONDS: Final = 0.01
_MAX_STARTS: Final = 3  # how often to start a companion, replacing killed ones

_GET_ADDRESS: Final = 0x8915  # Linux: SIOCGIFADDR
_NAME_BYTES: Final = 15

# Variables that name a job's network interface: gtopk's own, then those of the transports.
INTERFACE_VARIABLES: Final = (
    *(settings.INTERFACE.name, "GLOO_SOCKET_IFNAME"),
    *("OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME"),
)

# Nothing is sent there: connecting a UDP socket to it shows which own address the system uses.
_OUTSIDE: Final = "192.0.2.1"  # RFC 5737


class Choice(NamedTuple):
    """An IPv4 address of this host ("" if there is none), and a text on how it was chosen."""

    address: str
    by: str


def own_address(one_host: bool) -> str:
    """Return the IPv4 address at which other ranks reach this one; "" if there is none.

    one_host: whether all ranks are on this host; then the address is not reachable from others.
    Raises ValueError if GTOPK_INTERFACE names an interface that this host does not have.
    """
    return choose_address(one_host).address


def choose_address(one_host: bool) -> Choice:
    """Return the address, as `own_address` does, and a text on how it was chosen."""
    if name := settings.INTERFACE.read():
        address = address_of(name)
        if not address:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"{settings.INTERFACE.name} must name an interface of this host with an IPv4 "
                f"address, got {name!r}; available: {names}"
            )
        return Choice(address, settings.INTERFACE.name)
    if one_host:
        return Choice("127.0.0.1", "all ranks on one host")
    for variable in INTERFACE_VARIABLES[1:]:
        for name in os.environ.get(variable, "").split(","):
            # NCCL uses the prefix = (as in =eth0) for an exact match.
            if address := address_of(name.lstrip("=")):
                return Choice(address, variable)
    master = os.environ.get("MASTER_ADDR", "")
    for other, by in ((master, f"route to MASTER_ADDR={master}"), (_OUTSIDE, "default route")):
        address = _address_towards(other)
        # A host's own name may resolve to its loopback, which no other host reaches.
        if address and not address.startswith("127."):
            return Choice(address, by)
    found = [each for each in interfaces().values() if not each.startswith("127.")]
    return Choice(found[0], "first interface") if found else Choice("", "")


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, loopback included, by name."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address}


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address; "" if it does not exist or has none."""
    if len(interface) > _NAME_BYTES:  # the system would truncate it to another's name
        return ""
    request = struct.pack("256s", interface.encode(errors="replace"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def address_towards(host: str, port: int = 9) -> str:
    """Return this host's address towards another host, which can reach it there.

    Sends nothing. Raises OSError if there is no route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def _address_towards(host: str) -> str:
    try:
        return address_towards(host) if host else ""
    except OSError:
        return ""


def _open_note() -> int:
    """Return the descriptor of an empty memory file; off Linux, of an unnamed temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gtopk-note")
    file, path = tempfile.mkstemp(prefix="gtopk-note-")
    os.unlink(path)
    return file


class LostRank(NamedTuple):
    """A rank that is lost, and the reason for errors to quote."""

    rank: int
    why: str


class Heartbeat:
    """A rank's companion, from `start` to `close`.

    introduction: the companion's address, and this rank's share of the job's secret, in JSON types;
                  ranks exchange them before `start`.
    on_lost: called with each lost rank, in the heartbeat's thread.
    """

    _setting: Setting  # from `start` on

    def __init__(
        self, transport: Transport, timeout_seconds: float, warning_seconds: float, launcher: int
    ) -> None:
        """Open the companion's socket; raise ValueError for an interface that this host lacks.

        launcher: as in `Setting`.
        """
        address = own_address(one_host=len(transport.neighbours()) == transport.size)
        self.on_lost: Callable[[LostRank], None] = lambda lost: None
        self._rank = transport.rank
        self._timeout_seconds = timeout_seconds
        self._warning_seconds = warning_seconds
        self._launcher = launcher
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if address:
            self._socket.bind((address, 0))
        port = self._socket.getsockname()[1]  # 0 if the socket is not bound
        share = secrets.token_hex()
        self.introduction: list[Any] = [socket.gethostname(), os.getpid(), address, port, share]
        # Shared with the companion, which reads the step there if SIGKILL ends the rank.
        self._note_file = _open_note()
        write_note(self._note_file, 0, "")
        self._companion: subprocess.Popen[bytes] | None = None
        # Reentrant: a SIGTERM handler calls `explain`, and may interrupt another order.
        self._sending = threading.RLock()
        self._closing = False
        self._lost: list[LostRank] = []

    def start(self, introductions: Sequence[Sequence[Any]]) -> None:
        """Start the companion; introductions: every rank's, in rank order."""
        # Every rank contributes to the secret, so that none can choose it.
        shares = "".join(share for *_, share in introductions)
        self._setting = Setting(
            rank=self._rank,
            parent=os.getpid(),
            launcher=self._launcher,
            secret=hashlib.sha256(shares.encode()).hexdigest(),
            socket=self._socket.fileno(),
            note=self._note_file,
            timeout_seconds=self._timeout_seconds,
            warning_seconds=self._warning_seconds,
            peers=[Peer(rank, *place) for rank, (*place, _) in enumerate(introductions)],
        )
        self._send_first_beat()
        # A daemon thread does not keep the process alive after the program ends.
        threading.Thread(
            target=self._receive_losses, args=(self._launch(),), name="gtopk-heartbeat", daemon=True
        ).start()

    def _send_first_beat(self) -> None:
        """Send the first beat, from which on the others watch this rank.

        The companion sends the next one. It takes a moment to start, in which a host may be lost.
        """
        peers = self._setting.peers
        beat = Beat(self._rank, self._rank, State.ALIVE, time.monotonic_ns())
        datagram = beat.encode(bytes.fromhex(self._setting.secret))
        for distance in distances(len(peers)):
            peer = peers[(self._rank + distance) % len(peers)]
            with contextlib.suppress(OSError):  # as of a network that is down
                if peer.address:
                    self._socket.sendto(datagram, (peer.address, peer.port))

    def lost(self, wait_seconds: float = 0.0) -> LostRank | None:
        """Return the first lost rank; wait at most `wait_seconds` for a report of one."""
        # No lock or event: a SIGTERM handler calls this, perhaps within another call.
        until = time.monotonic() + wait_seconds
        while not self._lost and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return self._lost[0] if self._lost else None

    def note(self, step: int, advice: str) -> None:
        """Store the step and advice that the companion reports if this rank ends silently."""
        # Once closed, the descriptor's number may belong to another file.
        if not self._closing:
            write_note(self._note_file, step, advice)

    def explain(self, why: str) -> None:
        """Give the companion the reason to report to the others when this rank ends."""
        self._send_order(f"because {' '.join(why.split())}")

    def close(self) -> None:
        """Tell the others to stop watching this rank, as it leaves without a failure."""
        # Set before the order, so that `_receive_losses` does not replace the companion that obeys
        # it, and under the lock that guards replacement.
        with self._sending:
            self._closing = True
        self._send_order("leave")
        if self._companion is not None:
            self._await_end(self._companion)
        self._socket.close()
        os.close(self._note_file)

    def _await_end(self, companion: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            companion.wait(_LEAVE_SECONDS)
        companion.kill()
        companion.wait()
        with self._sending, contextlib.suppress(OSError):  # unread lines
            assert companion.stdin is not None
            companion.stdin.close()

    def release_after_fork(self) -> None:
        """Release the companion in a process that was forked from the rank."""
        if self._companion is not None:
            self._companion.returncode = 0  # else Popen would wait for it in this process

    def _launch(self) -> subprocess.Popen[bytes]:
        """Start and return a companion process."""
        companion = subprocess.Popen(
            command_of("companion"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._setting.socket, self._setting.note],
            # Signals to the rank's process group must not end the companion, which reports them.
            start_new_session=True,
        )
        assert companion.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # already killed
            companion.stdin.write(self._setting.line())
            companion.stdin.flush()
        self._companion = companion
        return companion

    def _send_order(self, line: str) -> None:
        companion = self._companion
        if companion is None or companion.stdin is None:
            return
        with self._sending, contextlib.suppress(OSError, ValueError):  # it was killed, or has left
            # Bypass the file's buffer, which does not allow a nested write.
            rest = f"{line}\n".encode(errors="replace")
            while rest:
                rest = rest[os.write(companion.stdin.fileno(), rest) :]

    def _receive_losses(self, companion: subprocess.Popen[bytes]) -> None:
        """Receive losses until the companion ends; replace it if it was killed."""
        from collectives.transports.transport import print_line

        for left in reversed(range(_MAX_STARTS)):
            assert companion.stdout is not None
            with companion.stdout as reports:
                for line in reports:
                    # Answer first: handling may take long, and an unresponsive rank is killed.
                    self._send_order("ack")
                    self._note_loss(json.loads(line))
            if self._closing:
                return
            companion.wait()
            consequence = "starting another" if left else "the other ranks will consider it lost"
            own = self._setting.peers[self._rank]
            print_line(f"{own}: its companion was ended ({companion.returncode}); {consequence}")
            if left:
                with self._sending:
                    if self._closing:  # closed meanwhile, with its socket
                        return
                    companion = self._launch()

    def _note_loss(self, report: Mapping[str, Any]) -> None:
        peer = self._setting.peers[report["lost"]]
        lost = LostRank(peer.rank, f"{report['why']}; host {peer.host}, pid {peer.pid}")
        self._lost.append(lost)
        self.on_lost(lost)
